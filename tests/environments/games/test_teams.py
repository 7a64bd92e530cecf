"""Teams whose agents share rewards."""

import numpy as np
import pytest
from gymnasium import spaces
from toy_games import Counting, Meeting, played

from alfish.environments.games import ParallelGames, TurnGames
from alfish.errors import UsageError
from alfish.parameters.schedules import Linear


def test_rewards_are_blended_with_the_mean_of_the_members_that_received_one():
    games = ParallelGames([Meeting()], teams={"pair": ["a", "b"]}, team_spirit=0.25)
    rows, _ = played(games, 3)
    assert rows[1]["a"].reward.tolist() == [1, 0, 1]  # b is absent, c has no team
    assert rows[3]["a"].reward.tolist() == [0.75 * 3, -0.75 * 3, 3]
    assert games.infos["a"]["own_reward"].tolist() == [3, -3, 0]
    assert games.infos["a"]["_own_reward"].tolist() == [True, True, False]
    assert games.infos["a"]["time"].tolist() == [3, 3, 3]


def test_team_rewards_since_the_last_action_are_summed():
    def twos(t, group, rows):
        return np.full(3, 2)

    alone, _ = played(TurnGames([Counting()]), 9, twos)
    blended, _ = played(TurnGames([Counting()], teams={"pair": ["player_0", "player_2"]}, team_spirit=0.5), 9, twos)
    # Mean reward of the pair after the moves of 0, 1, 2, 0, 1, after which 1 has ended, and of 2, 0, 2, 0.
    means = [0.5, -1, 0.5, 0.5, -1, 0.5, 0.5, 0.5, 0.5]
    # Rows of player_0 arrive after moves 3, 6, 8 and 9 of the game.
    for begin, end in ((0, 3), (3, 6), (6, 8), (8, 9)):
        own, reward = (rows[end]["player_0"].reward[0] for rows in (alone, blended))
        assert reward == 0.5 * own + 0.5 * sum(means[begin:end])
    assert [rows["player_0"].reward[1] for rows in blended] == [rows["player_0"].reward[1] for rows in alone]


def test_vector_rewards_are_blended_entry_by_entry():
    games = ParallelGames(
        [Meeting()], rewards={"own": "reward", "time": "info:time"}, teams={"all": "*"}, team_spirit=1.0
    )
    rows, _ = played(games, 3)
    assert rows[3]["a"].reward.tolist() == [[1, 3]] * 3


def test_a_schedule_follows_progress():
    games = ParallelGames([Meeting()], teams={"all": "*"}, team_spirit=Linear(0.0, 1.0))
    assert games.follows_progress
    games.reset()
    games.set_progress(1.0)
    assert games.step({"a": np.zeros(3, np.int64)})["a"].reward.tolist() == [1, 0, 1]
    assert games.step({"a": np.zeros(3, np.int64)})["a"].reward.tolist() == [2, 0, 2]
    assert games.step({"a": np.zeros(3, np.int64)})["a"].reward.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (
            {"teams": {"x": "foo_*"}},
            r"teams\['x'\] has 'foo_\*', which matches no agent; the agents are a, b, c",
        ),
        ({"teams": {"x": "a", "y": "*"}}, "make_games.teams has a in 'x' and in 'y'; an agent can be in one team only"),
        ({"team_spirit": 0.5}, "make_games.team_spirit is set, but make_games.teams is not"),
    ],
)
def test_mistakes_are_named(settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        ParallelGames([Meeting()], **settings)


def test_infos_as_rewards_in_turns_have_no_team():
    with pytest.raises(
        UsageError, match="make_games.rewards reads entries of infos, but counting is a turn-based game"
    ):
        TurnGames([Counting()], rewards={"x": "info:total"}, teams={"all": "*"}, team_spirit=0.5)


def test_vectors_in_turns_are_blended_too():
    class Two(Counting):
        reward_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

        def reset(self, seed=None, options=None):
            super().reset(seed)
            self._cumulative_rewards = {agent: np.zeros(2) for agent in self.agents}

        def step(self, action):
            ends = self.terminations[self.agent_selection] or self.truncations[self.agent_selection]
            if not ends:
                self._cumulative_rewards[self.agent_selection] = np.zeros(2)
            super().step(action)

        def _accumulate_rewards(self):
            self.rewards = {agent: np.array([reward, 1.0], np.float32) for agent, reward in self.rewards.items()}
            self._cumulative_rewards[self.moves[-1][0]] = np.zeros(2)
            super()._accumulate_rewards()

    games = TurnGames([Two()], rewards=["sum", "moves"], teams={"all": "*"}, team_spirit=0.5)
    rows, _ = played(games, 3)
    assert rows[3]["player_0"].reward[0, 1] == 3
    # Checkpoints restore sums as float64, and sums in another precision would have other bits.
    assert {total.dtype for total in games._of_team[0].values()} == {np.dtype(np.float64)}
