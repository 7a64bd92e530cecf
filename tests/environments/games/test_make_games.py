"""Games that are built from a module, a class or a function."""

import sys
import types

import gin
import gymnasium
import numpy as np
import pytest
from toy_games import Counting, Meeting, letters

from alfish.configuration.reading import read
from alfish.environments.games import ParallelGames, TurnGames, make_games
from alfish.errors import UsageError
from alfish.errors.user_code import CodeError
from alfish.parameters import imports

TICTACTOE = "pettingzoo.classic.tictactoe.tictactoe"


class TestGame:
    def test_game_module_with_only_env_acts_in_turns(self):
        games = make_games(TICTACTOE, 3)
        assert isinstance(games, TurnGames) and games.num_games == 3 and games.name == "tictactoe_v3"
        assert games.groups["player_1"].num_envs == 6 and games.stepping == "one by one"

    def test_game_module_is_parallel_if_possible(self):
        games = make_games("pettingzoo.classic.rps.rps", game_kwargs={"num_actions": 5})
        assert isinstance(games, ParallelGames) and games.groups["player_0"].action_space.n == 5

    @pytest.mark.parametrize("game, kind", [(Meeting, ParallelGames), (lambda: Counting(2), TurnGames)])
    def test_may_be_a_class_or_a_function(self, game, kind):
        assert isinstance(make_games(game, 2), kind)

    def test_may_be_named_by_module_and_class(self):
        assert make_games("toy_games:Meeting").name == "meeting"

    def test_receives_copies_of_its_arguments_and_the_render_mode(self):
        made, given = [], {"lengths": [2]}

        def make(lengths, render_mode):
            made.append((lengths, render_mode))
            return Counting(lengths[0])

        make_games(make, 2, game_kwargs=given, render_mode="rgb_array")
        assert [lengths is given["lengths"] for lengths, _ in made] == [False, False]
        assert [mode for _, mode in made] == ["rgb_array"] * 2

    def test_game_has_the_settings_of_make_games(self):
        games = make_games(
            Meeting,
            2,
            rewards={"own": "reward", "time": "info:time"},
            leaves=["state", "agent"],
            teams={"all": "*"},
            team_spirit=0.5,
            seed=4,
        )
        group = games.groups["a"]
        assert group.reward_spec.names == ("own", "time")
        assert set(group.observation_space.spaces) == {"observation", "state", "agent"}
        assert letters(games.reset()["a"].step_type) == "F.F" * 2
        assert games.step({"a": np.zeros(6, np.int64)})["a"].reward.tolist() == [[1, 1], [0, 0], [1, 1]] * 2
        assert games.games[1].seeds == [int(np.random.SeedSequence([4, 1, 0]).generate_state(1)[0] >> 1)]

    def test_game_is_configured_by_gin(self):
        read([], ["import alfish.environments.games", f"make_games.game = '{TICTACTOE}'", "make_games.num_games = 2"])
        assert gin.get_configurable(make_games)().num_games == 2


class Unlike:
    """An object that is no game."""

    possible_agents = ("a",)


class TestMistakes:
    @pytest.mark.parametrize(
        "game, sentence",
        [
            (
                "magent2.gather_v5",
                "make_games.game is .*, but magent2 is not installed: pip install magent2$",
            ),
            (
                "pettingzoo.classic.tictactoe_v9",
                "pettingzoo.classic has no module tictactoe_v9; write 'pettingzoo.classic.tictactoe_v3'",
            ),
            ("no_such_module", "make_games.game imports 'no_such_module', which is not installed"),
            ("json", "make_games.game is 'json', but this module has neither parallel_env nor env; give the class"),
            (
                "toy_games:Meting",
                "make_games.game is .*, but toy_games has no class or function Meting",
            ),
            (
                lambda: gymnasium.make("CartPole-v1"),
                "makes a .*, a gymnasium environment with one agent; use make_env",
            ),
            (Unlike, "make_games.game: Unlike makes a Unlike, which is not a PettingZoo game: it has no reset and no"),
        ],
    )
    def test_game_mistakes_name_the_remedy(self, game, sentence):
        with pytest.raises(UsageError, match=sentence):
            make_games(game)

    def test_the_error_for_a_missing_package_has_the_install_command(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pygame", None)
        for name in [name for name in sys.modules if name.startswith("pettingzoo.butterfly")]:
            monkeypatch.delitem(sys.modules, name)
        with pytest.raises(UsageError, match=r"which needs pygame: pip install 'pettingzoo\[butterfly\]'"):
            make_games("pettingzoo.butterfly.cooperative_pong.cooperative_pong")

    def test_a_wrong_argument_is_named(self):
        with pytest.raises(UsageError, match=r"make_games: Meeting does not take game_kwargs=\{'size': 3\}"):
            make_games(Meeting, game_kwargs={"size": 3})
        with pytest.raises(UsageError, match="cannot be filmed: it takes no render_mode"):
            make_games(lambda: Meeting(), render_mode="rgb_array")

    def test_an_error_of_a_constructor_is_a_sentence(self):
        def make():
            raise RuntimeError("no map")

        with pytest.raises(CodeError, match="the constructor of make raised RuntimeError: no map"):
            make_games(make)

    @pytest.mark.parametrize(
        "settings, sentence",
        [
            ({"num_games": 0}, "make_games.num_games"),
            ({"leaves": ["stat"]}, "make_games.leaves"),
            ({"team_spirit": 2.0, "teams": {"all": "*"}}, "make_games.team_spirit"),
        ],
    )
    def test_a_value_of_another_kind_is_refused(self, settings, sentence):
        with pytest.raises(UsageError, match=sentence):
            make_games(Meeting, **settings)

    def test_a_configuration_of_another_user_imports_no_module(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "their_games", types.ModuleType("their_games"))
        with imports.restricted(()), pytest.raises(UsageError, match="make_games.game calls a function of"):
            make_games("their_games:play")
