"""A policy that acts by what it sees, environments that know what happened in them, and judges of the rows."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toys import Stamped

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, LossInfo, StepType, in_line, trainable
from alfish.environments import VectorEnvironment
from alfish.transforms import Transforms
from alfish.unrollers import SyncUnroller

FIRST, MID, LAST, PAD = StepType.FIRST, StepType.MID, StepType.LAST, StepType.PAD
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
LENGTHS = ((3, 5, 1, 8), (2, 2, 7), (1,))


class Scripted(RLAlgorithm):
    """A deterministic policy: the action depends on the observation alone. `info` repeats the observation it saw."""

    on_policy = True

    def rollout_step(self, time_step, state):
        observation = time_step.observation
        if isinstance(self.action_spec, spaces.Discrete):
            action = observation.reshape(len(observation), -1).sum(-1).long() % int(self.action_spec.n)
        else:
            action = 3 * observation[:, :1].sin()
        return AlgStep(action, state, {"seen": observation, "step_type": time_step.step_type})

    def train_step(self, experience, state):
        return AlgStep()

    def calc_loss(self, experience, info):
        return LossInfo(torch.zeros(()))


class ScriptedOffPolicy(Scripted):
    on_policy = False


class Still(Scripted):
    def rollout_step(self, time_step, state):
        return AlgStep(torch.zeros(len(time_step.step_type), dtype=torch.int64), state)


class Recorded(Stamped):
    """Keeps its own record of what happened: (episode, step, action, arrived step, reward, terminated, truncated)."""

    def __init__(self, lengths, truncates=False):
        super().__init__(lengths, truncates)
        self.record = []

    def step(self, action):
        before = self._episode, self._step
        observation, reward, terminated, truncated, info = super().step(action)
        self.record.append((*before, int(action), self._step, reward, terminated, truncated))
        return observation, reward, terminated, truncated, info


class Expert(gymnasium.Env):
    """Does what it likes, and says so: 3 - the step it is at, in its own units (Box of [-2, 6]); nothing at step 2."""

    observation_space = spaces.Box(-10, 10, (1,), np.float32)
    action_space = spaces.Box(-2, 6, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._step += 1
        info = {} if self._step == 2 else {"executed_action": np.array([3.0 - self._step], np.float32)}
        return np.full(1, self._step, np.float32), 0.0, self._step == 4, False, info


def recorded(mode, truncates=False, lengths=LENGTHS):
    env = SyncVectorEnv([lambda of=of: Recorded(of, truncates) for of in lengths], autoreset_mode=mode)
    return VectorEnvironment(env, seeds=[11, 12, 13][: len(lengths)])


def unroller_of(environment, algorithm=Scripted, factories=()):
    specs = environment.observation_spec, environment.reward_spec
    transforms = Transforms(factories, *specs)
    made = algorithm(transforms.observation_spec, environment.action_spec, environment.reward_spec)
    return SyncUnroller(environment, made, transforms)


def unroll(unroller, length, **options):
    """An unroll in tensors, with all rows in their places."""
    return in_line(nest.tensors(unroller.unroll(length, **options))).experience


def real_rows(experience, column):
    """How many rows of a column are real; asserts that PAD is at its end only."""
    step_type = experience.time_step.step_type[:, column]
    pads = (step_type == PAD).tolist()
    count = pads.index(True) if True in pads else len(pads)
    assert all(pads[count:]) and not any(pads[:count])
    return count


def transitions(experience, column):
    """The trainable transitions of a column, as Recorded writes them."""
    step, found = experience.time_step, []
    for t in torch.nonzero(trainable(step.step_type)[:, column])[:, 0].tolist():
        _, episode, k = step.observation[t, column].tolist()
        assert step.observation[t + 1, column].tolist()[:2] == [step.observation[t, column, 0], episode]
        assert step.prev_action[t + 1, column] == experience.action[t, column]
        last = step.step_type[t + 1, column].item() == LAST
        terminated = step.discount[t + 1, column].item() == 0
        arrived, reward = step.observation[t + 1, column, 2].item(), step.reward[t + 1, column].item()
        action = experience.action[t, column].item()
        found.append((episode, k, action, arrived, reward, terminated, last and not terminated))
    return found


def check_stamps(rows, may_break=False):
    """Every row follows from the one before: same environment and episode, next step, the reward of that step."""
    for before, row in zip(rows, rows[1:]):
        if row[0] == FIRST:
            assert before[0] == LAST or may_break
            assert row[2][2] == 0
        else:
            assert before[0] in (FIRST, MID)
            assert row[2][:2] == before[2][:2] and row[2][2] == before[2][2] + 1 == row[1]


def assert_equal(found, expected):
    assert nest.paths(found) == nest.paths(expected)
    for path, a, b in zip(nest.paths(expected), nest.leaves(found), nest.leaves(expected)):
        assert isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b), path
