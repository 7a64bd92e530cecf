"""PettingZoo's games in turns as rows of columns, one for each agent of each game."""

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo.classic.tictactoe import tictactoe
from toy_games import MOVE, OBSERVATION, Counting, letters, played

from alfish import nest
from alfish.environments.games import TurnGames
from alfish.errors import UsageError
from alfish.errors.user_code import CodeError
from alfish.runs.checkpoints import check_loadable

PLAYERS = ("player_0", "player_1", "player_2")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_toy_follows_pettingzoos_interface():
    from pettingzoo.test import api_test  # it warns when it is imported

    api_test(Counting(), num_cycles=50)


def columns(rows, name="player_0"):
    """Returns the step types of each column over all steps, as text."""
    return [letters(column) for column in np.stack([each[name].step_type for each in rows], 1)]


def board_moves(*fields):
    """Returns a function that plays these fields of tictactoe one after another."""
    return lambda t, group, rows: np.full(group.num_envs, fields[t % (len(fields) + 1) % len(fields)])


class TestTictactoe:
    # The first player has the upper row after its third move.
    def rows(self, num_steps=5):
        games = TurnGames([tictactoe.env(), tictactoe.env()])
        assert games.turns == 2 and list(games.groups) == ["player_1"]
        return played(games, num_steps, board_moves(0, 3, 1, 4, 2))[0]

    def test_sides_have_a_row_when_it_is_their_turn(self):
        rows = self.rows(8)
        assert columns(rows, "player_1") == ["F.M.MLF.M", ".F.M.L.F."] * 2

    def test_each_side_sees_all_moves_and_the_final_board(self):
        stones = np.stack([each["player_1"].observation["observation"].sum((1, 2, 3)) for each in self.rows()], 1)
        assert stones[0, [0, 2, 4, 5]].tolist() == [0, 2, 4, 5]
        assert stones[1, [1, 3, 5]].tolist() == [1, 3, 5]

    def test_last_rows_have_each_sides_result_and_own_stones_first(self):
        last = self.rows()[-1]["player_1"]
        assert last.reward.tolist() == [1, -1, 1, -1] and last.discount.tolist() == [0, 0, 0, 0]
        board = last.observation["observation"]
        assert board[0, :, :, 0].sum() == 3 and board[1, :, :, 0].sum() == 2 and board[1, :, :, 1].sum() == 3

    def test_the_rows_have_the_side_s_own_action_before(self):
        actions = np.stack([each["player_1"].prev_action for each in self.rows()], 1)
        assert actions[0, [2, 4, 5]].tolist() == [0, 1, 2] and actions[1, [3, 5]].tolist() == [3, 4]

    def test_the_mask_of_a_row_allows_the_free_fields(self):
        masks = [each["player_1"].observation["action_mask"] for each in self.rows()]
        assert masks[2][0].tolist() == [0, 1, 1, 0, 1, 1, 1, 1, 1]

    def test_a_taken_field_is_refused_by_the_mask(self):
        games = TurnGames([tictactoe.env()])
        with pytest.raises(UsageError, match="tictactoe_v3: player_2 of game 0: its action is forbidden"):
            played(games, 2, lambda t, group, rows: np.array([4, 4]))


class TestRows:
    def test_agents_that_leave_in_mid_game_have_a_last_row(self):
        # Moves of 0, 1, 2, 0, 1, after which 1 has ended, and of 2, 0, 2, 0, after which the others have.
        rows, _ = played(TurnGames([Counting()]), 12)
        assert columns(rows) == ["F..M..M.MLF..", ".F..ML.....F.", "..F..M.M.L..F"]

    def test_rows_have_the_agents_own_previous_action(self):
        zoo = Counting()
        games = TurnGames([Counting(), zoo])
        rows, actions = played(games, 9)
        chosen = {player: [] for player in PLAYERS}
        waits = None
        for t, each in enumerate(rows):
            row = each["player_0"]
            if t:
                chosen[PLAYERS[waits]].append(actions[t - 1]["player_0"][3 + waits])
            for player in range(3):
                if row.step_type[3 + player] in (1, 2):
                    assert row.prev_action[3 + player] == chosen[PLAYERS[player]][-1]
                elif row.step_type[3 + player] == 0:
                    assert row.prev_action[3 + player] == 0
            waits = next((p for p in range(3) if row.step_type[3 + p] in (0, 1)), None)
        assert {p: [move for who, move in zoo.moves if who == p] for p in PLAYERS} == chosen

    def test_rows_sum_rewards_since_the_last_action(self):
        # Players add 1, 2, 1, 2, 1; the others lose half of it each time.
        rows, _ = played(TurnGames([Counting()]), 5, lambda t, group, rows: np.full(3, 1 + t % 2))
        found = [each["player_0"].reward.tolist() for each in rows]
        assert found[1][1] == 0  # what came before its first action
        assert found[3][0] == 1 - 1 - 0.5 and found[4][1] == 2 - 0.5 - 1 and found[5][1] == 1

    def test_rows_have_discount_0_only_after_termination(self):
        rows, _ = played(TurnGames([Counting()]), 9)
        discounts = np.stack([each["player_0"].discount for each in rows], 1)
        assert np.argwhere(discounts == 0).tolist() == [[1, 5]]

    def test_agents_without_a_turn_have_no_rows(self):
        rows, _ = played(TurnGames([Counting(length=1)]), 4)
        assert columns(rows) == ["FLFLF", ".....", "....."]

    def test_rows_have_the_infos_of_their_agents(self):
        games = TurnGames([Counting()])
        games.reset()
        games.step({"player_0": np.array([2, 0, 0])})
        assert games.infos["player_0"]["total"].tolist() == [0, 2, 0]


def test_seeds_of_a_game_do_not_depend_on_the_number_of_games():
    one, two = [Counting(4)], [Counting(4), Counting(4)]
    played(TurnGames(one, seed=7), 12)
    played(TurnGames(two, seed=7), 12)
    assert one[0].seeds == two[0].seeds and len({*two[0].seeds, *two[1].seeds}) == 6


class KeptCounting(Counting):
    """A counting game with a state."""

    def get_state(self):
        plain = {name: dict(getattr(self, name)) for name in ("rewards", "terminations", "truncations")}
        plain |= {"sums": dict(self._cumulative_rewards), "agents": list(self.agents), "next": self.agent_selection}
        order = [*self.selector.agent_order]
        return plain | {
            "total": self.total,
            "moves": self.num_moves,
            "order": order,
            "at": self.selector._current_agent,
        }

    def set_state(self, state):
        for name in ("rewards", "terminations", "truncations"):
            setattr(self, name, dict(state[name]))
        self._cumulative_rewards, self.agents = dict(state["sums"]), list(state["agents"])
        self.infos = {agent: {"total": state["total"]} for agent in self.agents}
        self.agent_selection, self.total, self.num_moves = state["next"], state["total"], state["moves"]
        self.selector.reinit(list(state["order"]))
        self.selector._current_agent = state["at"]


def test_a_state_continues_games_with_equal_rows():
    settings = {"seed": 3, "teams": {"all": "*"}, "team_spirit": 0.5}
    first = TurnGames([KeptCounting(), KeptCounting(6)], **settings)
    played(first, 4)
    state = first.state_dict()
    check_loadable(state, "state")
    second = TurnGames([KeptCounting(), KeptCounting(6)], **settings)
    assert second.load_state_dict(state)
    for t in range(12):
        action = {"player_0": (t + np.arange(6)) % 3}
        mine, other = second.step(action), first.step(action)
        for left, right in zip(nest.leaves(mine["player_0"]), nest.leaves(other["player_0"]), strict=True):
            np.testing.assert_array_equal(left, right)
    assert second.num_resets == first.num_resets


def test_games_without_a_state_are_reset():
    first, zoo = TurnGames([Counting()], seed=3), Counting()
    played(first, 4)
    second = TurnGames([zoo], seed=3)
    assert not second.load_state_dict(first.state_dict())
    assert letters(second.step({"player_0": np.zeros(3, np.int64)})["player_0"].step_type) == "F.."
    assert zoo.seeds == [int(np.random.SeedSequence([3, 0, 1]).generate_state(1)[0] >> 1)]


class TestMistakesOfGames:
    def test_an_agent_that_ended_leaves_the_list(self):
        class Stays(Counting):
            def _was_dead_step(self, action):
                pass

        with pytest.raises(
            UsageError, match=r"player_1 of game 0 has ended, but step\(None\) has not removed it from `agents`"
        ):
            played(TurnGames([Stays()]), 5)

    def test_an_agent_that_leaves_the_list_has_ended(self):
        class Vanishes(Counting):
            def step(self, action):
                super().step(action)
                self.agents = [agent for agent in self.agents if agent != "player_0"]

        with pytest.raises(UsageError, match="counting: player_0 of game 0 is no longer in `agents`"):
            played(TurnGames([Vanishes()]), 1)

    def test_agents_are_known_in_advance(self):
        class Strange(Counting):
            def step(self, action):
                super().step(action)
                self.agent_selection = "player_9"

        with pytest.raises(
            UsageError, match="counting: 'player_9' should act in game 0, but is not in possible_agents"
        ):
            played(TurnGames([Strange()]), 1)

    @pytest.mark.parametrize(
        "observation, sentence",
        [
            (np.full(4, np.nan), "counting: player_1 of game 1 has an observation that is not finite"),
            (
                np.zeros((2, 2), np.float32),
                r"player_1 of game 1 has the observation ndarray of shape \(2, 2\)",
            ),
        ],
    )
    def test_observations_of_another_form_name_agent_and_game(self, observation, sentence):
        class Wrong(Counting):
            def observe(self, agent):
                return super().observe(agent) if agent != "player_1" else observation

        with pytest.raises(UsageError, match=sentence):
            played(TurnGames([Counting(), Wrong()]), 1)

    def test_an_error_of_its_code_names_the_method(self):
        class Broken(Counting):
            def observe(self, agent):
                raise RuntimeError("no light")

        with pytest.raises(CodeError, match="counting.last raised RuntimeError: no light"):
            TurnGames([Broken()]).reset()

    def test_flags_are_bools(self):
        class Wordy(Counting):
            def last(self, observe=True):
                observation, reward, _, truncated, info = super().last(observe)
                return observation, reward, "no", truncated, info

        with pytest.raises(UsageError, match="terminated = 'no'"):
            TurnGames([Wordy()]).reset()


def test_groups_have_equal_spaces():
    class Two(Counting):
        def action_space(self, agent):
            return spaces.Discrete(2) if agent == "player_1" else MOVE

    games = TurnGames([Two()])
    assert {name: group.agents for name, group in games.groups.items()} == {
        "player_0": ("player_0", "player_2"),
        "player_1": ("player_1",),
    }
    rows, _ = played(games, 5, lambda t, group, rows: np.ones(group.num_envs, np.int64))
    assert columns(rows) == ["F..M..", "..F..M"] and columns(rows, "player_1") == [".F..ML"]
    assert games.groups["player_1"].observation_space == OBSERVATION


def test_a_game_that_fails_is_built_again_as_a_whole():
    class Broken(Counting):
        def step(self, action):
            if self.num_moves == 4:
                raise RuntimeError("broken on purpose")
            super().step(action)

    games, reports = TurnGames([Broken(), Counting()], make=Counting), []
    games.tolerate_errors(lambda game, error: reports.append(game))
    rows, _ = played(games, 14)
    own = [letters(column) for column in np.stack([each["player_0"].step_type for each in rows], 1)]
    whole = [letters(column) for column in np.stack([each["player_0"].step_type for each in
             played(TurnGames([Counting(), Counting()]), 14)[0]], 1)]  # fmt: skip
    assert reports == [0] and own[3:] == whole[3:]
    assert [text[5:] for text in own[:3]] == [text[:10] for text in whole[:3]]
