"""Games and algorithms of several policies that worker processes of the tests import."""

import os

import gin
import numpy as np
import torch
from toy_games import Meeting

from alfish.algorithms.rl_algorithm import RLAlgorithm, UnrollUse
from alfish.data import AlgStep, LossInfo
from alfish.environments import make_environment
from alfish.environments.games import SideBySide

TASKS = {"cart": ("CartPole-v1", 4), "pole": ("Pendulum-v1", 2), "car": ("MountainCar-v0", 3)}


def environment(name, index=0, **_):
    """Returns the environments of a task in a worker, with seeds that depend on the worker only."""
    env_id, num_envs = TASKS[name]
    return make_environment(env_id, num_envs=num_envs, seed=100 * index + len(name))


def side_by_side(names, index=0, **_):
    """Returns the environments of several tasks as one game."""
    return SideBySide({name: environment(name, index) for name in names})


class Walker(RLAlgorithm):
    """Acts at random; its weight grows by an update. The info has the weight with which it acted."""

    on_policy = True
    unroll_use = UnrollUse(single_epoch=False, handles_stale_policies=True)

    def __init__(self, *specs):
        super().__init__(*specs)
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def rollout_step(self, time_step, state):
        return AlgStep(self.random_action(time_step), state, {"weight": self.weight.expand(time_step.reward.shape)})

    def train_step(self, experience, state):
        return AlgStep(info=self.weight.expand(experience.time_step.reward.shape))

    def calc_loss(self, experience, info):
        return LossInfo(-self.weight.expand(experience.time_step.reward.shape))


class NotCorrecting(Walker):
    unroll_use = UnrollUse(single_epoch=False)


class OffPolicyWalker(Walker):
    on_policy = False
    unroll_use = UnrollUse()

    def calc_loss(self, experience, info):
        return LossInfo(-self.weight.expand(1, experience.time_step.reward.shape[1]))


class Constant(OffPolicyWalker):
    """Chooses action 0."""

    def rollout_step(self, time_step, state):
        return AlgStep(torch.zeros(time_step.reward.shape, dtype=torch.int64), state)


@gin.configurable(module="worker_games")
class Marked(Walker):
    """A walker whose info has a setting, too."""

    def __init__(self, *specs, mark=1.0):
        super().__init__(*specs)
        self.mark = mark

    def rollout_step(self, time_step, state):
        step = super().rollout_step(time_step, state)
        return step._replace(info={**step.info, "mark": torch.full(time_step.reward.shape, self.mark)})


class RememberingWalker(OffPolicyWalker):
    def initial_state(self, batch_size):
        return torch.zeros(batch_size)


class Faulty(Meeting):
    """Fails in a way at step 3 of its second game, once for all games that share the file `once`.

    Args:
      kind: 'raise', 'nan', 'shape', 'reward' or 'exit'.
      once: path that exists after the first failure; None means that it fails each time.
    """

    def __init__(self, kind="raise", once=None, render_mode=None):
        super().__init__(render_mode)
        self.kind, self.once = kind, once

    def step(self, actions):
        observations, rewards, *rest = super().step(actions)
        if self.game == 1 and self.time == 3 and self.is_due():
            if self.kind == "raise":
                raise RuntimeError("broken on purpose")
            if self.kind == "exit":
                os._exit(3)
            if self.kind == "nan":
                observations["a"] = np.full(4, np.nan, np.float32)
            if self.kind == "shape":
                observations["c"] = observations["c"][:2]
            if self.kind == "reward":
                rewards["a"] = np.inf
        return observations, rewards, *rest

    def is_due(self):
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True
