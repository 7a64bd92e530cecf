"""REDQ and TQC: variants of SAC that combine the values of the critics differently.

REDQ, randomized ensembled double Q-learning: Chen et al., 2021, https://arxiv.org/abs/2101.05982. DroQ (Hiraoka et al.,
2022, https://arxiv.org/abs/2110.02034) is REDQ with two critics, layer norm and dropout; the target is the minimum of
both critics. TQC, truncated quantile critics: Kuznetsov et al., 2020, https://arxiv.org/abs/2005.04269.
"""

from collections.abc import Callable
from typing import Any

import gin
import torch
from gymnasium import spaces

from alfish import specs
from alfish.algorithms.sac import SAC
from alfish.errors import UsageError
from alfish.functional.distributions import random_subset
from alfish.functional.return_distributions import Quantiles
from alfish.nest import Nest
from alfish.parameters import PositiveInt, checked


@gin.configurable(module="alfish.algorithms")
@checked
class REDQ(SAC):
    """SAC whose target is the minimum of a random subset of critics; the actor maximizes the mean of all critics.

    Args:
      target_subset: number of critics in the random subset of each update; None means all critics.
      sac_arguments: settings of `SAC`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        target_subset: PositiveInt | None = 2,
        **sac_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **sac_arguments)
        self._target_subset, size = target_subset, self.critic.ensemble_size
        if target_subset is not None and target_subset > size:
            raise UsageError(
                f"{type(self).__name__}.target_subset is {target_subset}; it must be at most {size}, the number of "
                "critics"
            )

    def target_q(self, q: torch.Tensor) -> torch.Tensor:
        return self.values.least(random_subset([q], self._target_subset)[0])

    def actor_q(self, q: torch.Tensor) -> torch.Tensor:
        return self.values.average(q)


@gin.configurable(module="alfish.algorithms")
@checked
class TQC(SAC):
    """SAC with truncated quantiles as values; the actor maximizes the mean of all critics.

    The algorithm requires Box actions and a scalar reward.

    Args:
      values: class or factory of a distribution of the return, called with gamma. Targets leave out the largest
        quantiles, `Quantiles.num_dropped` per critic, which is 0 by default.
      sac_arguments: settings of `SAC`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        values: Callable[..., Any] = Quantiles,
        **sac_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, values=values, **sac_arguments)

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        specs.check_box_action(cls.__name__, action_spec)
        specs.check_scalar_reward(cls.__name__, reward_spec)

    def actor_q(self, q: torch.Tensor) -> torch.Tensor:
        return self.values.average(q)
