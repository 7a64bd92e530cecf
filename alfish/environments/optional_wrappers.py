"""Wrappers of single environments that a configuration imports and adds to `make_environment.wrappers`."""

from collections.abc import Mapping
from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.errors import UsageError
from alfish.parameters import PositiveInt, UnitInterval, checked


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


@gin.configurable(module="alfish.environments")
@checked
class ResetOptions(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """Passes options to each reset of the environment.

        import alfish.environments.optional_wrappers
        make_environment.wrappers = [@ResetOptions]
        ResetOptions.options = {'low': -0.1, 'high': 0.1}  # CartPole-v1

    Args:
      env: the environment.
      options: the argument `options` of `reset`; entries that the caller of `reset` gives replace those of this dict.
    """

    def __init__(self, env: gymnasium.Env, options: Mapping[str, Any] = gin.REQUIRED):
        gymnasium.utils.RecordConstructorArgs.__init__(self, options=options)
        gymnasium.Wrapper.__init__(self, env)
        self._options = dict(options)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed, options=self._options | (options or {}))


@gin.configurable(module="alfish.environments")
@checked
class SplitObservation(gymnasium.ObservationWrapper, gymnasium.utils.RecordConstructorArgs):
    """Splits a one-dimensional Box observation into a Dict of consecutive parts.

        make_environment.wrappers = [@SplitObservation]
        SplitObservation.sizes = {'position': 8, 'velocity': 9}  # HalfCheetah-v5

    Args:
      env: environment whose observation is a Box of shape (n,).
      sizes: number of entries of each leaf, in the order of the observation; the numbers add up to n.

    Raises:
      UsageError: the observation is not a one-dimensional Box, or the sizes do not add up to n.
    """

    def __init__(self, env: gymnasium.Env, sizes: Mapping[str, PositiveInt] = gin.REQUIRED):
        gymnasium.utils.RecordConstructorArgs.__init__(self, sizes=dict(sizes))
        gymnasium.ObservationWrapper.__init__(self, env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise UsageError(f"SplitObservation splits a Box of shape (n,), but the observation is {space}")
        if sum(sizes.values()) != space.shape[0]:
            raise UsageError(
                f"SplitObservation.sizes is {dict(sizes)}, {sum(sizes.values())} entries in total, but the observation "
                f"has {space.shape[0]}"
            )
        ends = np.cumsum(list(sizes.values())).tolist()
        self._parts = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends)}
        self.observation_space = spaces.Dict(
            {
                name: spaces.Box(space.low[part], space.high[part], dtype=space.dtype)
                for name, part in self._parts.items()
            }
        )

    def observation(self, observation: Any) -> dict[str, Any]:
        """Returns the parts of an observation `(n,)`; the parts share the observation's memory."""
        return {name: observation[part] for name, part in self._parts.items()}
