"""A wrapper that splits a vector observation into named leaves, for separate encoders and transforms."""

from collections.abc import Mapping
from typing import Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces

from alfish.errors import UsageError
from alfish.parameters import PositiveInt, checked


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
