"""Environments whose columns have no row in some steps: each column's rows train once, whatever steps others end in."""

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, LossInfo, StepType, TimeStep, in_line, trainable
from alfish.environments import Environment
from alfish.learner.batches import EpochBatches
from alfish.metrics import AverageReturn, EnvironmentSteps, Metrics, NumberOfEpisodes
from alfish.replay import RingBuffer
from alfish.runs.checkpoints import Checkpoints
from alfish.training.evaluator import make_evaluator
from alfish.transforms import Transforms
from alfish.unrollers import SyncUnroller

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
# Steps after which each agent leaves, game after game; the departure of a game's last agent resets the game.
LENGTHS = ((1, 4, 2), (3, 1, 1), (2, 5, 5))


@gin.configurable
class Departures(Environment):
    """Games of three agents, each with a column. Even agents leave by termination, odd ones by truncation.

    Observations are (agent, game, step), and rewards the step. Records the transitions of each column.
    """

    uneven = has_gaps = True

    def __init__(self, num_envs=3, lengths=LENGTHS, seed=0, evaluation=False):
        self.num_games = -(-num_envs // 3)
        super().__init__(
            3 * self.num_games, spaces.Box(0, 1000, (3,), np.float32), spaces.Discrete(3), specs.reward_spec()
        )
        self._lengths = lengths
        self.record = [[] for _ in range(self.num_envs)]
        self.seeds = [[] for _ in range(self.num_games)]
        self._game = np.full(self.num_games, -1)
        self._step = np.zeros(self.num_games, int)
        self._left = np.zeros(self.num_envs, int)  # steps until each agent leaves; 0 if it has left
        self._resets, self._restarts = None, False

    def reset(self, seeds=None, rows=None):
        self._restarts = False
        self._begin(np.full(self.num_games, True), None if seeds is None else seeds[::3])
        return self._first()

    def step(self, action):
        if self._restarts:
            return self.reset()
        action, present = np.asarray(action), self._left > 0
        self._step += 1
        self._left -= present
        reward = np.where(present, self._step.repeat(3), 0).astype(np.float32)
        leaves = present & (self._left == 0)
        terminated = leaves & (self.env_id % 3 % 2 == 0)
        step_type = np.select([leaves, present], [LAST, MID], PAD).astype(np.int32)
        for column in np.flatnonzero(present).tolist():
            game, k = int(self._game[column // 3]), int(self._step[column // 3])
            ends = bool(terminated[column]), bool(leaves[column] and not terminated[column])
            self.record[column].append((game, k - 1, int(action[column]), k, float(k), *ends))
        arrived = TimeStep(step_type, reward, 1 - terminated.astype(np.float32), self._seen(), action, self.env_id)
        if (over := (self._left.reshape(-1, 3) == 0).all(1)).any():
            self._begin(over)
            self._resets = over.repeat(3), self._first()
        return arrived

    def take_resets(self):
        resets, self._resets = self._resets, None
        return resets

    def state_dict(self):
        return {"game": self._game.tolist()}

    def load_state_dict(self, state):
        self._game[:], self._restarts = state["game"], True
        return False

    def close(self):
        pass

    def _begin(self, rows, seeds=None):
        self._game[rows] += 1
        self._step[rows] = 0
        for game in np.flatnonzero(rows).tolist():
            self._left[3 * game : 3 * game + 3] = self._lengths[self._game[game] % len(self._lengths)]
            self.seeds[game].append(None if seeds is None else seeds[game])

    def _seen(self):
        columns = self.env_id % 3, self._game.repeat(3), self._step.repeat(3)
        return np.stack(columns, 1).astype(np.float32)

    def _first(self):
        zero = np.zeros(self.num_envs, np.float32)
        action = np.zeros(self.num_envs, np.int64)
        return TimeStep(np.full(self.num_envs, FIRST, np.int32), zero, zero + 1, self._seen(), action, self.env_id)


class Numbered(RLAlgorithm):
    """Acts by what it sees."""

    on_policy = True

    def rollout_step(self, time_step, state):
        return AlgStep(time_step.observation.sum(-1).long() % 3, state)

    def train_step(self, experience, state):
        return AlgStep()

    def calc_loss(self, experience, info):
        return LossInfo(torch.zeros(()))


class NumberedOffPolicy(Numbered):
    on_policy = False


def unroller_of(environment, algorithm=Numbered):
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    return SyncUnroller(environment, algorithm(*_specs(environment)), transforms)


def _specs(environment):
    return environment.observation_spec, environment.action_spec, environment.reward_spec


def transitions(experience, column):
    """The trainable transitions of a column, as `Departures` writes them."""
    experience, found = nest.tensors(experience), []
    step = experience.time_step
    for t in trainable(step.step_type)[:, column].nonzero()[:, 0].tolist():
        agent, game, k = step.observation[t, column].tolist()
        assert agent == column % 3
        assert step.observation[t + 1, column].tolist()[:2] == [agent, game]
        assert step.prev_action[t + 1, column] == experience.action[t, column]
        ends, terminated = step.step_type[t + 1, column] == LAST, step.discount[t + 1, column] == 0
        arrival = int(step.observation[t + 1, column, 2]), float(step.reward[t + 1, column])
        action = int(experience.action[t, column])
        found.append((int(game), int(k), action, *arrival, bool(terminated), bool(ends and not terminated)))
    return found


def unroll(unroller, length):
    """An unroll with all rows in their places."""
    return in_line(unroller.unroll(length)).experience


@pytest.mark.parametrize("length", [1, 3, 16])
def test_each_agents_transitions_train_once_and_in_order(length):
    environment = Departures(num_envs=6)
    unroller, found = unroller_of(environment), [[] for _ in range(6)]
    for _ in range(90 // length):
        experience = unroll(unroller, length)
        step_type = experience.time_step.step_type
        assert not ((step_type[:-1] == PAD) & (step_type[1:] != PAD)).any()  # gaps are closed
        for column in range(6):
            found[column] += transitions(experience, column)
    assert found == environment.record
    assert all(len(column) > 20 for column in found)


def test_an_epoch_trains_each_agents_transitions_once():
    environment = Departures(num_envs=6)
    unroller, source, num_trained = unroller_of(environment), EpochBatches(), 0
    source.bind(unroller._algorithm, unroller._transforms, 8, 6)
    for _ in range(10):
        source.add(unroller.unroll(8))
        for chunk in source.chunks(0):
            num_trained += int(chunk.source.mask.sum())
    assert num_trained == source._num_epochs * sum(map(len, environment.record))


def test_an_unroll_takes_no_more_steps_than_it_was_asked_for():
    turns = (1, 1, 9), (1, 9, 1), (9, 1, 1)  # no column has a row in each step
    unroller = unroller_of(Departures(lengths=turns))
    for _ in range(5):
        unroller.unroll(20)
        assert sum((unroller.records.step_type == MID).any(1)) <= 20


def test_replay_receives_each_agents_episodes_one_after_another():
    environment = Departures()
    unroller, ring = unroller_of(environment, NumberedOffPolicy), None
    columns = [[] for _ in range(3)]
    for _ in range(15):
        experience = unroll(unroller, 4)
        ring = ring or RingBuffer(3000, 3)
        ring.push(experience)
        for column, rows in enumerate(columns):
            step = experience.time_step
            real = step.step_type[:, column] != PAD
            rows += zip(step.step_type[real, column].tolist(), step.observation[real, column].tolist())
    assert ring.num_rows == sum(map(len, columns))
    for column, rows in enumerate(columns):
        expected = [
            (FIRST if k == 0 else LAST if k == lengths[column] else MID, [column, game, k])
            for game, lengths in enumerate(LENGTHS * 15)
            for k in range(lengths[column] + 1)
        ]
        assert rows == expected[: len(rows)] and len(rows) > 20
    batch = ring.sample(500, 2)
    step = batch.experience.time_step
    assert torch.equal(step.observation[1] - step.observation[0], torch.tensor([0.0, 0, 1]).expand(500, 3))


def test_agents_that_left_count_no_steps_and_keep_their_return():
    environment = Departures()
    unroller = unroller_of(environment)
    metrics = Metrics([EnvironmentSteps(), NumberOfEpisodes(), AverageReturn()], 3)
    for _ in range(4):
        unroller.unroll(5)
        metrics.update(*unroller.records)
    found, moves = metrics.results(), environment.record
    ends = [sum(move[5] or move[6] for move in record) for record in moves]
    returns = [n * (n + 1) / 2 for column in range(3) for n in [game[column] for game in LENGTHS * 9][: ends[column]]]
    assert found["environment_steps"] == sum(map(len, moves))
    assert found["episodes"] == sum(ends) == len(returns)
    assert found["average_return"] == pytest.approx(np.mean(returns))


def test_a_resumed_run_ends_old_games_and_begins_the_next():
    unroller = unroller_of(Departures())
    unroller.unroll(2)  # game 0 goes on, agent a has left it
    assert unroller.time_step.step_type.tolist() == [PAD, MID, LAST]
    resumed = unroller_of(Departures())
    resumed.load_state_dict(unroller.state_dict())
    step = unroll(resumed, 3).time_step
    assert step.step_type[:2].T.tolist() == [[FIRST, MID], [LAST, FIRST], [LAST, FIRST]]  # agent a ends only once
    assert step.observation[[0, 1, 1], [0, 1, 2], 1].tolist() == [1, 1, 1]


def test_an_evaluation_takes_whole_games_and_seeds_each_of_them():
    environment = Departures(num_envs=4)
    assert environment.num_envs == 6
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    evaluator = make_evaluator(Departures, PPO(*_specs(environment)), transforms, 4)
    evaluation = evaluator.evaluate(4, seed=100)
    assert evaluation.lengths == (1, 4, 2, 1) and evaluation.returns == (1, 10, 3, 1)
    assert [seeds[0] for seeds in evaluator.environment.seeds] == [100, 103]


@pytest.mark.slow
def test_workers_in_lockstep_make_the_same_rows_twice(tmp_path):
    conf, found = tmp_path / "departures.gin", []
    conf.write_text("""
        include 'appo.gin'
        import test_gaps
        Trainer.environment = @Departures
        Departures.num_envs = 12
        Trainer.num_env_steps = 1_000
        Trainer.unroll_length = 32
        EpochBatches.minibatch_size = 128
        Trainer.unroller = @AsyncUnroller
        AsyncUnroller.num_workers = 2
        AsyncUnroller.mode = 'lockstep'
        AsyncUnroller.envs_per_worker = 6
    """)
    for name in ("a", "b"):
        assert main(["train", f"--gin_file={conf}", f"--root_dir={tmp_path / name}"]) == 0
        state = Checkpoints(tmp_path / name / "checkpoints").load()[1]
        found.append(nest.leaves(state["algorithm"]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
