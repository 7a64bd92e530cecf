"""Random actions that replace some actions of the policy, mostly for evaluations of deterministic games."""

from typing import Any

import gin
import gymnasium
import numpy as np

from alfish.parameters import UnitInterval, checked


@gin.configurable(module="alfish.environments")
@checked
class RandomActions(gymnasium.Wrapper):
    """Replaces each action, with a given probability, by a random action.

    A policy that always takes its most probable action may repeat itself forever in a deterministic game. Evaluations
    of DQN therefore act at random in 5 % of the steps (Mnih et al., 2015, Methods). Which steps have random actions,
    and which actions, depends only on the seed of the episode. Do not use this wrapper with action masks, which may
    forbid the random action.

    Args:
      env: the environment.
      fraction: probability that an action is replaced, in [0, 1].
    """

    def __init__(self, env: gymnasium.Env, fraction: UnitInterval = 0.05):
        super().__init__(env)
        self._fraction = fraction
        self._actions = env.action_space
        self._random = np.random.default_rng()  # separate from the environment's generator

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
            self._actions.seed(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        is_replaced = self._random.random() < self._fraction
        return self.env.step(self._actions.sample() if is_replaced else action)
