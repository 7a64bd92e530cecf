"""PettingZoo's parallel games as rows of columns, one for each agent of each game."""

import numpy as np
import pytest
from gymnasium import spaces
from toy_games import OBSERVATION, Kept, Leaving, Masked, Meeting, letters, played

from alfish import nest
from alfish.environments.games import ParallelGames
from alfish.errors import UsageError
from alfish.errors.user_code import CodeError
from alfish.runs.checkpoints import check_loadable
from alfish.specs import ActionMask


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_toy_follows_pettingzoos_interface():
    from pettingzoo.test import parallel_api_test  # it warns when it is imported

    parallel_api_test(Leaving())


def columns(rows, name="a"):
    """Returns the step types of each column over all steps, as text."""
    return [letters(column) for column in np.stack([each[name].step_type for each in rows], 1)]


class TestRows:
    def test_rows_of_agents_that_join_leave_and_return(self):
        rows, _ = played(ParallelGames([Meeting()]), 12)
        assert columns(rows) == ["FMMMMMMMLFMMM", "..FML.FML..FM", "FMMMMMML.FMMM"]

    def test_rows_have_their_own_observation_even_at_an_end(self):
        rows, _ = played(ParallelGames([Meeting(), Meeting()]), 20)
        for t, each in enumerate(rows):
            seen = each["a"].observation
            for column in np.flatnonzero(each["a"].step_type != 3):
                assert seen[column, :3].tolist() == [column % 3, t // 9, t % 9]

    def test_rows_have_exactly_the_executed_actions(self):
        zoo = [Meeting(), Meeting()]
        games = ParallelGames(zoo)
        rows, actions = played(games, 30)
        for column in range(6):
            found = []
            for t in range(1, len(rows)):
                step_type = rows[t]["a"].step_type[column]
                if step_type in (1, 2):
                    assert rows[t]["a"].prev_action[column] == actions[t - 1]["a"][column]
                    found.append(((t - 1) // 9, (t - 1) % 9, actions[t - 1]["a"][column]))
                elif step_type == 0:
                    assert rows[t]["a"].prev_action[column] == 0
            assert found == zoo[column // 3].moves["abc"[column % 3]]

    def test_rows_have_the_move_reward_and_discount_0_only_after_termination(self):
        rows, _ = played(ParallelGames([Meeting()]), 9)
        rewards = np.stack([each["a"].reward for each in rows], 1)
        assert rewards.tolist() == [
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 0],
            [0, 0, 0, -3, -4, 0, 0, -7, -8, 0],
            [0, 1, 2, 3, 4, 5, 6, 7, 0, 0],
        ]
        discounts = np.stack([each["a"].discount for each in rows], 1)
        assert np.argwhere(discounts == 0).tolist() == [[0, 8], [2, 7]]

    def test_rows_are_never_overwritten(self):
        games = ParallelGames([Meeting(), Meeting()])
        rows = [games.reset()]
        copies = [nest.map(np.copy, rows[0])]
        for _ in range(12):
            action = {"a": np.ones(6, np.int64)}
            rows.append(games.step(action))
            copies.append(nest.map(np.copy, rows[-1]))
            action["a"][:] = 2
        for mine, other in zip(nest.leaves(tuple(rows)), nest.leaves(tuple(copies)), strict=True):
            np.testing.assert_array_equal(mine, other)

    def test_rows_have_infos_by_column_in_gymnasiums_format(self):
        games = ParallelGames([Meeting(), Meeting()])
        games.reset()
        assert games.infos == {"a": {}}
        games.step({"a": np.zeros(6, np.int64)})
        assert games.infos["a"]["time"].tolist() == [1, 0, 1] * 2
        assert games.infos["a"]["_time"].tolist() == [True, False, True] * 2

    def test_rows_mark_the_games_that_were_reset(self):
        games = ParallelGames([Meeting()])
        starts = [bool(games.reset() and games.starts[0])]
        starts += [bool(games.step({"a": np.zeros(3, np.int64)}) and games.starts[0]) for _ in range(9)]
        assert starts == [True] + [False] * 8 + [True] and games.num_resets == [2]

    def test_actions_of_absent_agents_are_ignored(self):
        zoo = [Meeting()]
        rows, _ = played(ParallelGames(zoo), 8, lambda t, group, rows: np.where(rows.step_type == 3, 99, 1))
        assert {action for moves in zoo[0].moves.values() for *_, action in moves} == {1}
        assert {int(a) for each in rows for a in each["a"].prev_action} <= {0, 1}


class TestSeeds:
    def test_seeds_of_a_game_do_not_depend_on_the_number_of_games(self):
        one, three = [Meeting()], [Meeting() for _ in range(3)]
        played(ParallelGames(one, seed=5), 20)
        played(ParallelGames(three, seed=5), 20)
        expected = [
            [int(np.random.SeedSequence([5, game, k]).generate_state(1)[0] >> 1) for k in range(3)] for game in range(3)
        ]
        assert [game.seeds for game in three] == expected and one[0].seeds == expected[0]

    def test_may_be_given(self):
        zoo = [Meeting(), Meeting()]
        games = ParallelGames(zoo)
        games.reset([11, None])
        assert zoo[0].seeds == [11] and zoo[1].seeds[0] not in (11, None) and games.num_resets == [1, 1]


class TestState:
    def test_continues_games_that_have_one_with_equal_rows(self):
        games, again = ([Kept(), Kept()] for _ in range(2))
        first = ParallelGames(games, seed=3)
        played(first, 7)
        state = first.state_dict()
        check_loadable(state, "state")
        second = ParallelGames(again, seed=3)
        assert second.load_state_dict(state)
        for t in range(15):
            action = {"a": (t + np.arange(6)) % 3}
            mine, other = second.step(action), first.step(action)
            for left, right in zip(nest.leaves(mine["a"]), nest.leaves(other["a"]), strict=True):
                np.testing.assert_array_equal(left, right)
            assert second.starts.tolist() == first.starts.tolist()
        assert second.num_resets == first.num_resets

    def test_loading_a_state_begins_the_next_games(self):
        zoo, again = [Meeting()], [Meeting()]
        first = ParallelGames(zoo, seed=3)
        played(first, 12)
        second = ParallelGames(again, seed=3)
        assert not second.load_state_dict(first.state_dict())
        assert letters(second.step({"a": np.zeros(3, np.int64)})["a"].step_type) == "F.F"
        assert second.starts.tolist() == [True]
        played(first, 9)  # makes resets 2 and 3
        assert again[0].seeds == [zoo[0].seeds[2]]

    def test_a_state_with_another_number_of_games_causes_a_reset(self):
        first = ParallelGames([Kept()], seed=3)
        played(first, 12)
        second = ParallelGames([Kept(), Kept()], seed=3)
        assert not second.load_state_dict(first.state_dict())
        assert letters(second.step({"a": np.zeros(6, np.int64)})["a"].step_type) == "F.FF.F"
        assert second.num_resets == [3, 1]

    def test_abandoned_games_are_not_asked_for_their_state(self):
        games = ParallelGames([Kept()])
        games.reset()
        games.abandon()
        assert games.state_dict() == {"num_resets": [1]}

    def test_state_has_only_values_that_a_checkpoint_can_hold(self):
        class Strange(Kept):
            def get_state(self):
                return {"generator": self.generator}

        with pytest.raises(UsageError, match=r"meeting.get_state\(\)"):
            ParallelGames([Strange()]).reset()


class TestGroups:
    class Two(Meeting):
        def observation_space(self, agent):
            return spaces.Box(0, 1000, (3,), np.float32) if agent == "b" else OBSERVATION

        def observed(self, agents):
            found = super().observed(agents)
            return {agent: row[:3] if agent == "b" else row for agent, row in found.items()}

    def test_groups_have_equal_spaces_and_their_first_agents_name(self):
        games = ParallelGames([self.Two(), self.Two()])
        assert {name: group.agents for name, group in games.groups.items()} == {"a": ("a", "c"), "b": ("b",)}
        assert [group.num_envs for group in games.groups.values()] == [4, 2]
        rows, _ = played(games, 3)
        assert rows[3]["a"].observation.shape == (4, 4) and letters(rows[3]["b"].step_type) == "MM"
        assert rows[3]["a"].observation[:, 0].tolist() == [0, 2, 0, 2]

    def test_groups_with_box_and_mixed_actions_act_in_game_units(self):
        class Boxes(Meeting):
            def action_space(self, agent):
                free = spaces.Box(-np.inf, np.inf, (1,), np.float32)
                return spaces.Dict(turn=spaces.Box(0, 10, (2,), np.float32), go=spaces.Discrete(3, start=1), free=free)

            def step(self, actions):
                self.taken = {agent: nest.map(np.copy, action) for agent, action in actions.items()}
                for action in actions.values():
                    action["turn"][:] = action["free"][:] = 7  # a game may write to its action
                return super().step({agent: action["go"] for agent, action in actions.items()})

        zoo = [Boxes()]
        games = ParallelGames(zoo)
        games.reset()
        action = {"turn": np.array([[0, 2]] * 3, np.float32), "go": np.arange(3), "free": np.ones((3, 1), np.float32)}
        given = nest.map(np.copy, action)
        rows = games.step({"a": action})
        taken = zoo[0].taken["c"]
        assert taken["turn"].tolist() == [5, 10] and taken["go"] == 3 and taken["free"] == 1
        before = rows["a"].prev_action
        assert before["turn"][2].tolist() == [0, 1] and before["go"][2] == 2 and before["free"][2] == 1
        for mine, other in zip(nest.leaves(action), nest.leaves(given), strict=True):
            np.testing.assert_array_equal(mine, other)


class TestMasks:
    def test_pettingzoo_games_are_found_by_convention(self):
        games = ParallelGames([Masked()])
        assert isinstance(games.groups["a"].observation_spec["action_mask"], ActionMask)
        rows, _ = played(games, 8, lambda t, group, rows: rows.observation["action_mask"].argmax(1))
        masks = [each["a"].observation["action_mask"].tolist() for each in rows]
        assert masks[4][0] == [1, 0, 1] and masks[8][0] == [1, 1, 1]  # all, where no action follows

    @pytest.mark.parametrize("place, source", [("info", "info:action_mask"), ("method", "method:allowed")])
    def test_from_other_places_become_a_leaf(self, place, source):
        games = ParallelGames([Masked(place)], action_mask=source)
        assert set(games.groups["a"].observation_space.spaces) == {"observation", "action_mask"}
        rows, _ = played(games, 8, lambda t, group, rows: rows.observation["action_mask"].argmax(1))
        assert rows[4]["a"].observation["action_mask"][0].tolist() == [1, 0, 1]

    def test_masks_are_not_searched_in_other_observations(self):
        assert "mask" not in str(ParallelGames([Masked("info")]).groups["a"].observation_space)

    def test_refuse_a_forbidden_action_of_an_agent_that_acts(self):
        games = ParallelGames([Masked(), Masked()])
        games.reset()
        games.step({"a": np.array([1, 99, 1] * 2)})  # b, which is absent, may have any action
        with pytest.raises(
            UsageError, match=r"meeting: c of game 1: its action is forbidden.* allows the choices \[0, 2\];"
        ):
            games.step({"a": np.array([0, 0, 0, 0, 0, 1])})

    def test_empty_masks_are_refused_before_an_episode_end(self):
        class Stuck(Masked):
            def allowed(self, agent):
                return np.zeros(3, np.int8)

        with pytest.raises(UsageError, match="the mask of a in game 0 forbids every choice"):
            ParallelGames([Stuck()]).reset()

    def test_missing_are_named(self):
        with pytest.raises(UsageError, match="action_mask = 'info:legal', but there was no mask of a in game 0"):
            ParallelGames([Masked("info")], action_mask="info:legal").reset()
        with pytest.raises(UsageError, match="make_games.action_mask is 'observation:legal', but the observation has"):
            ParallelGames([Masked()], action_mask="observation:legal")
        with pytest.raises(UsageError, match="action_mask is 'method:legal', but meeting has no method legal"):
            ParallelGames([Meeting()], action_mask="method:legal").reset()


class TestVectorRewards:
    class Two(Meeting):
        def reward_space(self, agent):
            return spaces.Box(-np.inf, np.inf, (2,), np.float32)

        def step(self, actions):
            observations, rewards, *rest = super().step(actions)
            return observations, {agent: np.array([reward, 1]) for agent, reward in rewards.items()}, *rest

    def test_vector_rewards_of_a_game_have_names(self):
        games = ParallelGames([self.Two()], rewards=["time", "one"])
        assert games.groups["a"].reward_spec.names == ("time", "one")
        rows, _ = played(games, 3)
        assert rows[3]["a"].reward.tolist() == [[3, 1], [-3, 1], [3, 1]]
        assert ParallelGames([self.Two()]).groups["a"].reward_spec.names == ("0", "1")

    def test_come_from_infos_and_rewards(self):
        games = ParallelGames([Meeting()], rewards={"own": "reward", "time": "info:time"})
        rows, _ = played(games, 3)
        assert rows[3]["a"].reward.tolist() == [[3, 3], [-3, 3], [3, 3]]

    @pytest.mark.parametrize(
        "game, rewards, sentence",
        [
            (Meeting, ["x", "y"], "make_games.rewards names 2 entries, but the environment's reward is a scalar"),
            (Two, ["x"], "make_games.rewards names 1 entries, but the environment's reward has 2 entries"),
            (Meeting, [], r"make_games.rewards is \[\]; it must name at least one entry"),
            (Meeting, {"x": "information:x"}, "make_games.rewards = .*: 'information:x' is not a source of a reward"),
        ],
    )
    def test_missing_vector_rewards_are_refused(self, game, rewards, sentence):
        with pytest.raises(UsageError, match=sentence):
            ParallelGames([game()], rewards=rewards)

    def test_missing_from_an_info_are_named(self):
        games = ParallelGames([Meeting()], rewards={"x": "info:x"})
        with pytest.raises(UsageError, match="'info:x' was missing after a step"):
            played(games, 1)


def changed(step=None, reset=None, **attributes):
    """Returns a class of meetings whose results are changed by functions."""

    class Changed(Meeting):
        def step(self, actions):
            results = super().step(actions)
            return results if step is None else step(self, *results)

        def reset(self, seed=None, options=None):
            results = super().reset(seed)
            return results if reset is None else reset(self, *results)

    for name, value in attributes.items():
        setattr(Changed, name, value)
    return Changed


def without(number):
    """Returns a function that leaves agent c out of a result of `step`."""
    return lambda game, *results: tuple(
        {agent: each for agent, each in result.items() if agent != "c"} if i == number else result
        for i, result in enumerate(results)
    )


def with_value(number, value):
    """Returns a function that gives agent c another value in a result of `step`."""
    return lambda game, *results: tuple(
        {**result, "c": value} if i == number else result for i, result in enumerate(results)
    )


def stays(game, observations, rewards, terminated, truncated, infos):
    return observations, rewards, {**terminated, "c": True}, truncated, infos


def stranger(game, *results):
    game.agents = [*game.agents, "d"]
    return results


def nobody(game, *results):
    game.agents = []
    return results


class TestMistakesOfGames:
    @pytest.mark.parametrize(
        "game, sentence",
        [
            (
                changed(without(0)),
                "meeting: step returned no observations of c in game 0, although this agent has acted",
            ),
            (changed(without(1)), "meeting: step returned no rewards of c in game 0, although this agent has acted"),
            (
                changed(without(2)),
                "meeting: step returned no terminations of c in game 0, although this agent has acted",
            ),
            (
                changed(without(3)),
                "meeting: step returned no truncations of c in game 0, although this agent has acted",
            ),
            (changed(stays), "meeting: c of game 0 is terminated or truncated, but still in `agents`"),
            (changed(stranger), "meeting: 'd' is in `agents` of game 0, but not in possible_agents, .* a, b, c"),
            (changed(reset=nobody), "meeting: game 0 has no agent that can act after reset"),
            (changed(lambda game, *results: results[:4]), "meeting.step did not return 5 dicts"),
            (changed(reset=lambda game, *results: results[0]), "meeting.reset did not return 2 dicts"),
            (changed(with_value(2, "no")), "terminated = 'no'; it must be True or False"),
            (changed(with_value(1, "x")), "meeting: c of game 0 has the reward 'x'; it must be a number"),
            (changed(with_value(1, [1, 2])), "c of game 0 has a reward of 2 numbers, but the game has no reward_space"),
            (changed(with_value(1, np.nan)), "meeting: c of game 0 has a reward that is not finite"),
            (changed(with_value(0, np.full(4, np.nan))), "c of game 0 has an observation that is not finite"),
            (changed(with_value(0, np.zeros(3))), r"c of game 0 has the observation ndarray of shape \(3,\)"),
            (changed(with_value(0, {"x": 1})), "c of game 0 has the observation {'x': 1}, but its observation_space"),
        ],
    )
    def test_mistakes_are_named_with_agent_and_game(self, game, sentence):
        with pytest.raises(UsageError, match=sentence):
            played(ParallelGames([game()]), 1)

    def test_name_the_game_among_several(self):
        with pytest.raises(UsageError, match="meeting: c of game 1 has an observation that is not finite"):
            played(ParallelGames([Meeting(), changed(with_value(0, np.full(4, np.inf)))()]), 1)

    def test_an_agent_without_observation_cannot_appear(self):
        def hidden(game, observations, *rest):
            return {agent: each for agent, each in observations.items() if agent != "b"}, *rest

        with pytest.raises(UsageError, match="meeting: b is in `agents` of game 0, but has no observation"):
            played(ParallelGames([changed(hidden)()]), 2)

    def test_an_error_of_its_code_names_the_method(self):
        def broken(game, *results):
            raise KeyError("fuel")

        with pytest.raises(CodeError, match="meeting.step raised KeyError: 'fuel'"):
            played(ParallelGames([changed(broken)()]), 1)

    @pytest.mark.parametrize("agents", [None, [], "abc", ["a", "a"], [0, 1]])
    def test_agents_are_known_in_advance(self, agents):
        game = Meeting()
        game.possible_agents = agents
        with pytest.raises(UsageError, match="meeting.*possible_agents"):
            ParallelGames([game])

    def test_games_are_equal(self):
        with pytest.raises(UsageError, match="one meeting has the possible_agents .*; they must be equal"):
            ParallelGames([Meeting(), Leaving()])
        with pytest.raises(UsageError, match="b has the spaces .* in one meeting, but .* in another"):
            ParallelGames([Meeting(), TestGroups.Two()])

    def test_games_that_keep_ended_agents_in_the_list_are_accepted(self):
        def keep(game, observations, rewards, terminated, truncated, infos):
            if not game.agents:
                game.agents = list(rewards)
            return observations, rewards, terminated, truncated, infos

        rows, _ = played(ParallelGames([changed(keep)()]), 9)
        assert columns(rows) == ["FMMMMMMMLF", "..FML.FML.", "FMMMMMML.F"]


def test_a_curriculum_receives_training_progress():
    class Taught(Meeting):
        def set_progress(self, progress):
            self.progress = progress

    zoo = [Taught(), Taught()]
    games = ParallelGames(zoo)
    assert games.follows_progress and not ParallelGames([Meeting()]).follows_progress
    games.set_progress(0.5)
    assert [game.progress for game in zoo] == [0.5, 0.5]
    played(games, 3)
    assert games.render(1)[0, 0, 0] == 3
    games.close()
    assert zoo[1].agents == []


class Broken(Meeting):
    """Fails in a way at step 3 of its second game, and when it is reset for the third time."""

    kind = "raise"

    def reset(self, seed=None, options=None):
        if self.kind == "reset" and self.game == 1:
            raise RuntimeError("broken on purpose")
        return super().reset(seed, options)

    def step(self, actions):
        observations, rewards, *rest = super().step(actions)
        if self.game == 1 and self.time == 3:
            if self.kind == "raise":
                raise RuntimeError("broken on purpose")
            if self.kind == "nan":
                observations["a"] = np.full(4, np.nan, np.float32)
            if self.kind == "shape":
                observations["c"] = observations["c"][:2]
            if self.kind == "late":
                observations["b"] = observations["b"][:2]
            if self.kind == "reward":
                rewards["a"] = np.inf
            if self.kind == "missing":
                del rewards["b"]
        return observations, rewards, *rest


class TestErrors:
    @pytest.mark.parametrize("kind", ["raise", "nan", "shape", "late", "reward", "missing"])
    def test_errors_rebuild_the_whole_game(self, kind):
        broken, whole = Broken(), Meeting()
        broken.kind = kind
        games, reports = ParallelGames([broken, whole], seed=3, make=Meeting), []
        games.tolerate_errors(lambda game, error: reports.append((game, str(error))))
        expected, _ = played(ParallelGames([Meeting(), Meeting()], seed=3), 20)
        rows = [games.reset()]
        for t in range(20):
            rows.append(games.step({"a": (t + np.arange(6)) % 3}))
            if t == 11:  # the step that failed; game 0 began at row 9 for the second time
                assert games.broken["a"].tolist() == [True] * 3 + [False] * 3
                assert games.starts.tolist() == [True, False] and not games.is_over[0]
            else:
                assert games.broken == {}
        assert [game for game, _ in reports] == [0] and games.games[1] is whole and games.games[0] is not broken
        own = columns(rows)
        assert own[:3] == ["FMMMMMMMLFMM" + "FMMMMMMML"[: 21 - 12], "..FML.FML..F" + "..FML.FML"[: 21 - 12],
                           "FMMMMMML.FMM" + "FMMMMMML."[: 21 - 12]]  # fmt: skip
        assert own[3:] == columns(expected)[3:]
        assert games.num_resets == [3, 3] and rows[12]["a"].reward[:3].tolist() == [0, 0, 0]
        assert np.isfinite(rows[12]["a"].observation).all() and not rows[12]["a"].prev_action[:3].any()
        assert games.games[0].seeds[0] not in (broken.seeds[0], broken.seeds[1])

    def test_failed_resets_rebuild_a_game_until_a_reset_succeeds(self):
        def make():
            made = Broken()
            made.kind, made.game = "reset", 1 if len(reports) < 3 else -1
            return made

        first = Broken()
        first.kind = "reset"
        reports = []
        games = ParallelGames([first], make=make)
        games.tolerate_errors(lambda game, error: reports.append(game))
        rows, _ = played(games, 20)
        assert reports == [0, 0, 0] and columns(rows)[0] == "FMMMMMMMLFMMMMMMMLFMM"

    def test_errors_of_the_first_reset_are_raised(self):
        broken = Broken()
        broken.kind, broken.game = "reset", 1
        games = ParallelGames([broken], make=Meeting)
        games.tolerate_errors(lambda game, error: None)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            games.reset()

    @pytest.mark.parametrize("tolerant", [False, True])
    def test_errors_are_raised_unless_tolerated_and_games_can_be_rebuilt(self, tolerant):
        games = ParallelGames([Broken()], make=None if tolerant else Meeting)
        if tolerant:
            games.tolerate_errors(lambda game, error: None)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            played(games, 20)

    def test_a_new_game_receives_the_progress_of_training(self):
        class Curriculum(Broken):
            progress = None

            def set_progress(self, progress):
                self.progress = progress

        games = ParallelGames([Curriculum()], make=Curriculum)
        games.tolerate_errors(lambda game, error: None)
        games.set_progress(0.25)
        played(games, 12)
        assert games.games[0].progress == 0.25
