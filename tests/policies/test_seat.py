"""Each executed action trains exactly once, in the rows of the policy that chose it."""

import collections
import functools
from typing import ClassVar

import numpy as np
import pytest
import torch
from toy_games import Counting, Kept, Meeting

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, LossInfo, StepType, trainable
from alfish.environments.games import ParallelGames, TurnGames
from alfish.training.trainer import Trainer
from alfish.transforms import RewardNormalizer, Transform


class Counter(RLAlgorithm):
    """Acts at random; its memory is the number of its own rows in the episode, which is its info, too."""

    on_policy = True

    def __init__(self, *specs):
        super().__init__(*specs)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def initial_state(self, batch_size):
        return torch.zeros(batch_size, dtype=torch.int64)

    def rollout_step(self, time_step, state):
        return AlgStep(self.random_action(time_step), state + 1, {"rows_before": state})

    def train_step(self, experience, state):
        return AlgStep(info=self.weight.expand(experience.time_step.reward.shape))

    def calc_loss(self, experience, info):
        return LossInfo(info)


class Memoryless(Counter):
    def initial_state(self, batch_size):
        return None

    def rollout_step(self, time_step, state):
        return AlgStep(self.random_action(time_step), None, {})


def unroller_of(make, tmp_path, policies, algorithm=Counter):
    trainer = Trainer(
        tmp_path / "run",
        environment=make,
        algorithm=algorithm,
        policies=policies,
        unroll_length=4,
        num_iterations=1,
        listeners=[],
    )
    return trainer.unroller


def transitions(experience):
    """Yields for each row that trains: its observation, its action, its info, and the row after it."""
    experience = nest.tensors(experience)
    step = experience.time_step
    for t, column in trainable(step.step_type).nonzero().tolist():
        after = nest.at(step, (t + 1, column))
        info = nest.map(torch.Tensor.item, nest.at(experience.info, (t, column)))
        yield step.observation[t, column].tolist(), experience.action[t, column].item(), info, after


LINEUPS = {
    "shared": None,
    "each": "each",
    "fixed": {"x": "a", "y": ["b", "c"]},
    "drawn": {"x": "*", "y": "*", "z": "*"},
}


@pytest.mark.parametrize("length", [1, 3, 16])
@pytest.mark.parametrize("lineup", LINEUPS)
def test_moves_of_returning_agents_train_once(tmp_path, lineup, length):
    games = [Meeting(), Meeting(), Meeting()]
    unroller = unroller_of(lambda **_: ParallelGames(games, seed=3), tmp_path, LINEUPS[lineup], Memoryless)
    found, players = [], {}
    for _ in range(-(-48 // length)):
        for name, experience in unroller.unroll(length).items():
            step_type = experience.time_step.step_type
            assert not ((step_type[:-1] == StepType.PAD) & (step_type[1:] != StepType.PAD)).any()
            for (agent, game, time, noise), action, _, after in transitions(experience):
                assert after.observation.tolist()[:3] == [agent, game, time + 1] and after.prev_action == action
                assert after.reward == (time + 1) * (-1 if agent == 1 else 1)
                found.append(("abc"[int(agent)], game, time, action))
                players.setdefault((noise, agent), set()).add(name)
    made = [(agent, *move) for one in games for agent, moves in one.moves.items() for move in moves]
    counts = {move: found.count(move) for move in made}
    assert sorted(found) == sorted(made) or lineup != "shared"
    assert counts == {move: made.count(move) for move in made}
    assert all(len(names) == 1 for names in players.values())


class Observing(Transform):
    """Records the observed rows as (column, step type, observation)."""

    rows: ClassVar[list] = []

    def transform(self, time_step, state):
        return time_step

    def observe(self, time_step):
        for t, column in (time_step.step_type != StepType.PAD).nonzero().tolist():
            row = time_step.observation[t, column].tolist()
            self.rows.append((column, int(time_step.step_type[t, column]), *row))


@pytest.mark.parametrize("length", [3, 7, 10])
@pytest.mark.parametrize(
    "make",
    [
        lambda **_: ParallelGames([Meeting(), Meeting()], seed=3),
        lambda **_: TurnGames([Counting(length=9), Counting(length=7)], seed=3),
    ],
    ids=["parallel", "turns"],
)
def test_transforms_observe_each_row_once_and_in_order(tmp_path, make, length):
    trainer = Trainer(
        tmp_path / "run",
        environment=make,
        algorithm=Memoryless,
        transforms=[Observing, functools.partial(RewardNormalizer, gamma=0.5)],
        policies="each",
        unroll_length=length,
        num_iterations=90 // length,
        listeners=[],
    )
    Observing.rows.clear()
    trainer.train()
    episodes = collections.Counter()
    kinds = {}
    for column, kind, agent, *_ in Observing.rows:
        before = kinds.get((agent, column), StepType.LAST)
        assert kind == StepType.FIRST if before == StepType.LAST else kind in (StepType.MID, StepType.LAST)
        kinds[agent, column] = kind
        episodes[agent] += kind == StepType.FIRST
    assert min(episodes.values()) > 5


def test_agents_in_turns_train_on_each_move_once_with_their_own_memory(tmp_path):
    games = [Counting(length=9), Counting(length=7)]
    unroller = unroller_of(lambda **_: TurnGames(games, seed=3), tmp_path, "each")
    found = {name: [] for name in ("player_0", "player_1", "player_2")}
    rows = [(name, row) for _ in range(20) for name, own in unroller.unroll(4).items() for row in transitions(own)]
    order = [player for player, _ in games[0].moves[:9]]  # the players of the moves of each game, until it ends
    for name, ((player, total, num_moves, _), action, info, after) in rows:
        found[name].append(action)
        assert name == f"player_{int(player)}" == order[int(num_moves)]
        # A player's memory has counted its own rows since the game began, and stood still in the turns of others.
        assert info["rows_before"] == order[: int(num_moves)].count(name)
        assert after.prev_action == action and after.observation[1] >= total + action
    for name, actions in found.items():
        made = [action for game in games for player, action in game.moves if player == name]
        assert len(made) - 2 <= len(actions) <= len(made)  # the last move of each game waits for the row after it
        assert not collections.Counter(actions) - collections.Counter(made)


def test_the_state_of_row_0_belongs_to_the_waiting_row(tmp_path):
    unroller = unroller_of(lambda **_: TurnGames([Counting()], seed=3), tmp_path, "each")
    for _ in range(12):
        for experience in unroller.unroll(4).values():
            step_type, state = experience.time_step.step_type[0], experience.state
            rows_before = experience.info["rows_before"][0]
            shown = step_type != StepType.PAD
            np.testing.assert_array_equal(state[shown], rows_before[shown])


def test_an_unroller_continues_from_its_state_with_equal_rows(tmp_path):
    def make(**_):
        return ParallelGames([Kept(), Kept()], seed=3)

    one = unroller_of(make, tmp_path / "one", LINEUPS["drawn"])
    other = unroller_of(make, tmp_path / "other", LINEUPS["drawn"])
    for _ in range(5):
        one.unroll(3)
    other.load_state_dict(one.state_dict())
    for _ in range(5):
        rows = [nest.plain(nest.tensors(unroller.unroll(3))) for unroller in (one, other)]
        torch.testing.assert_close(*rows, rtol=0, atol=0, equal_nan=True)
    assert all(np.array_equal(one.lineup.playing[key], other.lineup.playing[key]) for key in one.lineup.playing)


def test_after_a_break_all_games_are_reset(tmp_path):
    def make(**_):
        return TurnGames([Counting(), Counting()], seed=3)

    one = unroller_of(make, tmp_path / "one", "each")
    one.unroll(5)  # player_2 has acted and waits for the row after its action
    one.break_off()
    other = unroller_of(make, tmp_path / "other", "each")
    other.load_state_dict(one.state_dict())
    for unroller in (one, other):
        first = unroller.unroll(4)
        assert all(set(rows.time_step.step_type[0].tolist()) == {StepType.FIRST} for rows in first.values())
    assert other.games.num_resets == [2, 2]
