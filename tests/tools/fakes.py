"""Stand-ins for vectorised simulators, with the traps of each, and an algorithm that shows which rows a stream has.

`Clocks` are the episodes of all of them: an observation is (column, episode, step), and what happens depends on these
numbers and on the action, so the same policy makes the same episodes in every simulator and reset mode.
"""

import math

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, LossInfo, StepType, in_line, trainable
from alfish.environments import Simulator, SimulatorStep
from alfish.functional.returns import gae
from alfish.transforms import Transforms
from alfish.unrollers import SyncUnroller

LENGTHS = (3, 5, 1, 8, 2)
OBSERVATION = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTION = spaces.Box(-np.inf, np.inf, (1,), np.float32)
VALUE = torch.tensor([0.3, -0.2, 0.5])  # the value of an observation is the cosine of its product with these


class Clocks:
    """Episodes of B environments, which end by termination, by truncation, or by both at once."""

    def __init__(self, num_envs, device="cpu", lengths=LENGTHS):
        self.lengths = torch.tensor(lengths).to(device)
        self.column = torch.arange(num_envs, device=device)
        self.episode = torch.full((num_envs,), -1, device=device)
        self.step = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def observation(self):
        return torch.stack([self.column, self.episode, self.step], 1).float()

    def advance(self, action):
        """Returns reward, terminated and truncated."""
        self.step = self.step + 1
        ended = self.step >= self.lengths[(2 * self.column + 3 * self.episode) % len(self.lengths)]
        kind = (self.column + self.episode) % 3
        reward = self.step / 2 + self.column / 4 + action.reshape(-1) / 8
        return reward, ended & (kind != 1), ended & (kind != 0)

    def begin(self, rows=None):
        """Begins the next episode of some environments, `[B]` bool; None means all."""
        rows = torch.ones_like(self.step, dtype=torch.bool) if rows is None else rows
        self.episode, self.step = self.episode + rows.long(), torch.where(rows, 0, self.step)


class StampedVector(VectorEnv):
    """`Clocks` as a vector environment of tensors, in the modes NEXT_STEP and SAME_STEP."""

    def __init__(self, num_envs, mode=AutoresetMode.SAME_STEP, device="cpu"):
        self.metadata = {"autoreset_mode": mode}
        self.num_envs, self.device = num_envs, torch.device(device)
        self.single_observation_space, self.single_action_space = OBSERVATION, ACTION
        self.clocks, self.infos = Clocks(num_envs, device), {}
        self._ended = torch.zeros(num_envs, dtype=torch.bool, device=device)

    def reset(self, *, seed=None, options=None):
        self.clocks.begin()
        return self.clocks.observation(), {}

    def step(self, action):
        in_same_step = self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        before = self._ended
        reward, terminated, truncated = self.clocks.advance(action)
        if in_same_step:
            final = self.clocks.observation()
            self.clocks.begin(terminated | truncated)
            return self.clocks.observation(), reward, terminated, truncated, {"final_obs": final}
        self.clocks.begin(before)
        self._ended = (terminated | truncated) & ~before
        return self.clocks.observation(), reward, terminated & ~before, truncated & ~before, {}


class StampedSimulator(Simulator):
    """`Clocks` as a simulator with the traps: it writes in place, and rows of `final_observation` are wrong elsewhere.

    `final` is 'ends' (given only in steps in which an episode ends), 'always' or 'lost'.
    """

    observation_space, action_space = OBSERVATION, ACTION

    def __init__(self, num_envs, device="cpu", seed=None, final="ends", lengths=LENGTHS):
        self.num_envs, self.device, self.seed = num_envs, torch.device(device), seed
        self.clocks, self.final, self.lengths = Clocks(num_envs, device, lengths), final, lengths
        self.seeds, self.actions, self.num_spread, self.is_closed = [], [], 0, False
        self._buffers = [torch.zeros(num_envs, 3, device=device), torch.zeros(num_envs, device=device)]
        self._buffers += [torch.zeros(num_envs, dtype=torch.bool, device=device) for _ in range(2)]

    def reset(self, seed):
        self.seeds.append(seed)
        self.clocks.begin()
        return self._buffers[0].copy_(self.clocks.observation())

    def step(self, action):
        self.actions.append(action)
        reward, terminated, truncated = self.clocks.advance(action)
        ended = terminated | truncated
        final = torch.where(ended[:, None], self.clocks.observation(), math.nan)
        if self.final == "lost" or (self.final == "ends" and not ended.any()):
            final = None
        self.clocks.begin(ended)
        for buffer, value in zip(self._buffers, (self.clocks.observation(), reward, terminated, truncated)):
            buffer.copy_(value)
        return SimulatorStep(*self._buffers, final)

    def spread_first_episodes(self):
        self.num_spread += 1

    def close(self):
        self.is_closed = True


class Acting(RLAlgorithm):
    """A deterministic policy, whose action depends on the leaf of the observation with the stamp."""

    on_policy = False

    def rollout_step(self, time_step, state):
        observation = next(leaf for leaf in nest.leaves(time_step.observation) if leaf.shape[-1] == 3)
        return AlgStep((observation.sum(1, keepdim=True) * 0.7).sin(), state)

    def train_step(self, experience, state):
        return AlgStep()

    def calc_loss(self, experience, info):
        return LossInfo(torch.zeros(()))


def unroller_of(environment, algorithm=Acting):
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    made = algorithm(environment.observation_spec, environment.action_spec, environment.reward_spec)
    return SyncUnroller(environment, made.to(environment.env_id.device), transforms)


def columns_of(environment, lengths=(4, 1, 9, 2, 7, 3, 5, 8, 1, 20), stamp=lambda observation: observation):
    """Returns the columns of a stream over unrolls of these lengths: rows as lists of numbers, and advantages.

    A row has step type, reward, discount, stamp, executed action, advantage, and whether it trains.

    Args:
      environment: environment to act in.
      lengths: numbers of vector steps.
      stamp: function from an observation to `[T, B, 3]`.
    """
    unroller, parts = unroller_of(environment), []
    for length in lengths:
        parts.append(in_line(nest.tensors(unroller.unroll(length))).experience)
    return [column_of([part.time_step for part in parts], b, stamp) for b in range(environment.num_envs)]


def column_of(parts, b, stamp):
    """Returns the rows of a column of time steps `[T, B]`, see `columns_of`."""
    real = [part.step_type[:, b] != StepType.PAD for part in parts]

    def joined(leaf_of):
        return torch.cat([leaf_of(part)[:, b][rows] for part, rows in zip(parts, real)])

    step_type, reward, discount = (joined(lambda part, i=i: part[i])[:, None] for i in range(3))
    stamps, executed = joined(lambda part: stamp(part.observation)), joined(lambda part: part.prev_action)
    value = (stamps @ VALUE).cos()[:, None]
    advantage = [*gae(reward, 0.9 * discount, value, step_type, 0.8)[:, 0].tolist(), 0.0]
    trains = [*trainable(step_type)[:, 0].tolist(), False]
    numbers = torch.cat([step_type, reward, discount, stamps, executed], 1).tolist()
    return [(*row, *others) for row, others in zip(numbers, zip(advantage, trains))]


def whole(column):
    """Returns the rows of a column up to its last LAST row, whose advantages do not depend on where the rows end."""
    ends = [t for t, row in enumerate(column) if row[0] == StepType.LAST]
    return column[: ends[-1] + 1]


def assert_same_streams(found, expected):
    """Asserts that the columns have the same rows, and the same advantages to 1e-6, as far as both go."""
    for own, other in zip(found, expected, strict=True):
        own, other = whole(own), whole(other)
        count = min(len(own), len(other))
        assert count > 12
        count = max(t for t in range(count) if own[t][0] == StepType.LAST) + 1
        for a, b in zip(own[:count], other[:count]):
            assert a[:7] == b[:7] and a[8] == b[8]
            assert abs(a[7] - b[7]) < 1e-6
