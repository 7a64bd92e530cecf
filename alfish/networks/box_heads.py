"""Further heads for Box actions: bounded means, state-dependent standard deviations, and beta distributions.

`PolicyHead.box = @BetaHead` replaces the default `NormalHead`. A head maps features `[..., input_size]` to a
distribution of actions `[..., A]`, in the algorithm's units: a Box with bounds is [-1, 1].
"""

import gin
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from alfish.errors import UsageError
from alfish.functional.beta import Beta
from alfish.functional.distributions import DiagonalNormal
from alfish.networks.heads import NormalHead
from alfish.networks.layers import orthogonal
from alfish.parameters import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt, checked
from alfish.specs import is_bounded, missing_bounds

LEAST_EXCESS = 1e-3  # least excess of alpha and beta over 1, so that the mode of a beta distribution is defined


@gin.configurable(module="alfish.networks")
@checked
class BoundedMeanHead(NormalHead):
    """A normal whose mean stays in a range: mean = bound tanh(x / bound) for the output x of the linear layer.

    Without this limit, a mean may move far beyond the action's bounds, where all samples are clipped to the same
    action. Other settings are those of `NormalHead`, also in gin (`NormalHead.gain`).

    Args:
      input_size: number of input features.
      space: space of a Box leaf of the action.
      bound: largest magnitude of the mean, in the algorithm's units.

    Source: Petrenko et al., 2020 (Sample Factory's `continuous_tanh_scale`).
    """

    def __init__(self, input_size: PositiveInt, space: spaces.Box, bound: PositiveFloat = 1.0):
        super().__init__(input_size, space)
        self._bound = bound

    def mean(self, features: torch.Tensor) -> torch.Tensor:
        return self._bound * torch.tanh(self.linear(features) / self._bound)


@gin.configurable(module="alfish.networks")
@checked
class StateDependentNormalHead(nn.Module):
    """A normal whose standard deviation depends on the observation.

    Args:
      input_size: number of input features.
      space: space of a Box leaf of the action.
      gain: gain of the orthogonal weights; a small gain gives the first policy a mean near 0, and a standard deviation
        near `initial_log_std`.
      initial_log_std: log standard deviation for an output of 0, in the algorithm's units.
      min_log_std: smooth lower bound of the log standard deviation.
      max_log_std: smooth upper bound of the log standard deviation; above min_log_std.
    """

    def __init__(
        self,
        input_size: PositiveInt,
        space: spaces.Box,
        gain: NonNegativeFloat = 0.01,
        initial_log_std: FiniteFloat = 0.0,
        min_log_std: FiniteFloat = -5.0,
        max_log_std: FiniteFloat = 2.0,
    ):
        super().__init__()
        if not min_log_std < initial_log_std < max_log_std:
            raise UsageError(
                f"StateDependentNormalHead.initial_log_std is {initial_log_std}; it must be between min_log_std "
                f"({min_log_std}) and max_log_std ({max_log_std})"
            )
        self.linear = orthogonal(nn.Linear(input_size, 2 * space.shape[0]), gain)
        self._middle, self._half = 0.5 * (min_log_std + max_log_std), 0.5 * (max_log_std - min_log_std)
        self._offset = float(torch.atanh(torch.tensor((initial_log_std - self._middle) / self._half)))

    def forward(self, features: torch.Tensor) -> DiagonalNormal:
        mean, x = self.linear(features).chunk(2, -1)
        return DiagonalNormal(mean, self._middle + self._half * torch.tanh(x + self._offset))


@gin.configurable(module="alfish.networks")
@checked
class BetaHead(nn.Module):
    """A beta distribution within the action's bounds: alpha and beta are 1 + softplus of a linear layer.

    Args:
      input_size: number of input features.
      space: space of a Box leaf of the action, with bounds.
      gain: gain of the orthogonal weights; a small gain makes the first policy almost symmetric, with its mean near 0.

    Raises:
      UsageError: the leaf has no bounds.

    Source: Chou, Maturana and Scherer, 2017.
    """

    def __init__(self, input_size: PositiveInt, space: spaces.Box, gain: NonNegativeFloat = 0.01):
        super().__init__()
        if not is_bounded(space):
            raise UsageError(
                f"BetaHead needs an action with bounds, and {space} has {missing_bounds(space)}; set "
                "make_environment.action_bounds, or leave PolicyHead.box out, which makes a normal"
            )
        self.linear = orthogonal(nn.Linear(input_size, 2 * space.shape[0]), gain)

    def forward(self, features: torch.Tensor) -> Beta:
        alpha, beta = (1 + LEAST_EXCESS + F.softplus(self.linear(features))).chunk(2, -1)
        return Beta(alpha, beta)
