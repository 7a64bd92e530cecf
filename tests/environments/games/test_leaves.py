"""Further leaves of the observations of agents."""

import numpy as np
import pytest
from gymnasium import spaces
from toy_games import OBSERVATION, Counting, Masked, Meeting, played

from alfish.environments.games import ParallelGames, TurnGames
from alfish.errors import UsageError


def test_without_any_the_observation_is_the_game_s_own():
    assert ParallelGames([Meeting()]).groups["a"].observation_space == OBSERVATION


class TestState:
    def test_state_is_the_game_state_after_the_step(self):
        games = ParallelGames([Meeting(), Meeting()], leaves=["state"])
        assert games.groups["a"].observation_space == spaces.Dict(observation=OBSERVATION, state=Meeting.state_space)
        rows, _ = played(games, 10)
        assert [each["a"].observation["state"][3].tolist() for each in rows[7:]] == [[0, 7], [0, 8], [1, 0], [1, 1]]

    def test_state_is_observed_at_the_agents_turn(self):
        zoo = Counting()
        rows, _ = played(TurnGames([zoo], leaves=["state"]), 3)
        moves = [move for _, move in zoo.moves]
        assert rows[3]["player_0"].observation["state"][0].tolist() == [sum(moves)]

    def test_a_missing_state_is_refused_with_a_remedy(self):
        class Without(Meeting):
            state_space = None

        with pytest.raises(UsageError, match=r"'state', but meeting has no state_space; .*leaves = \['others'\]"):
            ParallelGames([Without()], leaves=["state"])

    def test_a_state_of_another_shape_is_refused(self):
        class Wrong(Meeting):
            def state(self):
                return np.zeros(3)

        with pytest.raises(UsageError, match=r"meeting: state\(\) returned an array of shape \(3,\)"):
            ParallelGames([Wrong()], leaves=["state"]).reset()

    def test_a_non_finite_state_is_refused(self):
        class Wrong(Meeting):
            def state(self):
                return np.full(2, np.nan)

        with pytest.raises(UsageError, match="meeting: a of game 0 has an observation.state that is not finite"):
            ParallelGames([Wrong()], leaves=["state"]).reset()


class TestOthers:
    def test_leaves_show_other_agents_in_order_with_zeros_for_absent_agents(self):
        rows, _ = played(ParallelGames([Meeting()], leaves=["others"]), 5)
        others = [each["a"].observation["others"].reshape(3, 2, 4) for each in rows]
        own = [each["a"].observation["observation"] for each in rows]
        np.testing.assert_array_equal(others[1][0], [np.zeros(4), own[1][2]])  # b has not come yet
        np.testing.assert_array_equal(others[2][0], [own[2][1], own[2][2]])  # it has just come
        np.testing.assert_array_equal(others[2][1], [own[2][0], own[2][2]])
        np.testing.assert_array_equal(others[4][0], [own[4][1], own[4][2]])  # it has just left
        np.testing.assert_array_equal(others[5][0], [np.zeros(4), own[5][2]])

    def test_other_agents_have_one_hot_numbers_and_no_masks(self):
        class Named(Masked):
            def observation_space(self, agent):
                place = spaces.Discrete(3, start=5)
                return spaces.Dict(observation=place, action_mask=spaces.Box(0, 1, (3,), np.int8))

            def observed(self, agents):
                return {
                    agent: {
                        "observation": np.int64(5 + self.possible_agents.index(agent)),
                        "action_mask": self.allowed(agent),
                    }
                    for agent in agents
                }

            def present(self):
                self.generator.random()
                return super().present()

        games = ParallelGames([Named()], leaves=["others"])
        first = games.reset()["a"].observation
        assert first["others"].tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
        assert first["observation"].tolist() == [0, 0, 2]

    def test_other_agents_are_observed_at_the_agents_turn(self):
        zoo = Counting()
        rows, _ = played(TurnGames([zoo], leaves=["others"]), 6)
        total = sum(move for _, move in zoo.moves[:3])
        assert rows[3]["player_0"].observation["others"][0].tolist() == [1, total, 3, 0, 2, total, 3, 0]
        total = sum(move for _, move in zoo.moves)
        assert rows[6]["player_0"].observation["others"][0].tolist() == [
            0,
            0,
            0,
            0,
            2,
            total,
            6,
            0,
        ]  # player_1 has left

    def test_may_have_other_spaces(self):
        class Two(Meeting):
            def observation_space(self, agent):
                return spaces.Box(2, 1000, (1,), np.float32) if agent == "b" else OBSERVATION

            def observed(self, agents):
                found = super().observed(agents)
                return {agent: row[2:3] + 2 if agent == "b" else row for agent, row in found.items()}

        games = ParallelGames([Two()], leaves=["others"])
        shapes = [group.observation_space["others"].shape for group in games.groups.values()]
        assert shapes == [(5,), (8,)] and games.groups["a"].observation_space["others"].low.tolist() == [0] * 5
        rows, _ = played(games, 2)
        assert rows[2]["a"].observation["others"][0].tolist()[:3] == [4, 2, 0]

    def test_other_agents_are_refused_in_a_single_agent_game(self):
        class Alone(Meeting):
            timetable = {"a": [(0, 3)]}

        with pytest.raises(
            UsageError, match="make_games.leaves has 'others', but meeting has only one agent; leave it out"
        ):
            ParallelGames([Alone()], leaves=["others"])

    def test_observations_of_another_form_are_named(self):
        class Wrong(Meeting):
            def observed(self, agents):
                return {agent: row[:3] for agent, row in super().observed(agents).items()}

        with pytest.raises(UsageError, match="meeting: the observation of a has 3 numbers"):
            ParallelGames([Wrong()], leaves=["others"]).reset()


class TestAgent:
    def test_agent_number_is_one_hot_in_its_group(self):
        games = ParallelGames([Meeting(), Meeting()], leaves=["agent"])
        np.testing.assert_array_equal(played(games, 2)[0][2]["a"].observation["agent"], np.tile(np.eye(3), (2, 1)))


def test_agent_leaves_are_added_to_the_game_leaves():
    games = ParallelGames([Masked()], leaves=["state", "others", "agent"])
    assert set(games.groups["a"].observation_space.spaces) == {"observation", "action_mask", "state", "others", "agent"}


def test_a_name_that_the_observation_has_is_refused():
    class Taken(Meeting):
        def observation_space(self, agent):
            return spaces.Dict(state=OBSERVATION)

    with pytest.raises(UsageError, match="make_games.leaves has 'state', but the observation of a in meeting already"):
        ParallelGames([Taken()], leaves=["state"])
