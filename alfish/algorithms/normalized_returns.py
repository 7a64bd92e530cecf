"""Actor-critics whose critic predicts returns normalized by a running mean and standard deviation (PopArt).

    v = mean + std y(s)                          y: output of the critic's last layer
    L = ((v - R) / std)^2 / 2                    differentiated for y only; R: target of the value

Policies, advantages and bootstraps read v, in units of return. Only the network's gradient is in normalized units, so
learning does not depend on the scale of the reward, and algorithms need no changes.

After each iteration, the value targets of the collected rows update mean and std, and the last layer is rescaled such
that v stays the same. Before the first update of the statistics, v is 0 and the critic does not train.

van Hasselt et al., 2016, https://arxiv.org/abs/1602.07714; Hessel et al., 2018, https://arxiv.org/abs/1809.04474.

Difference from the papers: the statistics are of all rows so far, as in Sample Factory, not a moving average.
"""

from typing import Any

import gin
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from alfish.algorithms.a2c import A2C
from alfish.algorithms.actor_critic import ActorCriticAlgorithm
from alfish.algorithms.appo import APPO
from alfish.algorithms.ppo import PPO
from alfish.data import Experience, trainable
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.parameters import checked
from alfish.transforms.normalizers import RunningMoments

SMALLEST_STD = 1e-3  # smallest std, as a fraction of the returns' root mean square, for constant returns


class NormalizedValueHead(nn.Module):
    """Returns values in units of return, and passes gradients in normalized units to a linear layer.

    Args:
      linear: last layer of the critic, with R outputs.
    """

    std: torch.Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._moments = RunningMoments((linear.out_features,))
        self.register_buffer("std", torch.zeros(linear.out_features))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Returns values `[..., R]` for features `[..., F]`."""
        output = F.linear(features, self.weight, self.bias)
        value = (self._moments.shift + self.std * output).detach()
        slope = torch.where(self.std > 0, 1 / self.std, 0)
        return value + slope * (output - output.detach())  # the second term is 0, but carries the gradient

    @torch.no_grad()
    def observe(self, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """Adds returns `[N, R]` to the statistics where `mask` `[N]` is True; keeps values by rescaling the layer."""
        moments, weight, bias = self._moments, self.weight, self.bias
        mean, std = moments.shift.double(), self.std.double()
        moments.update(returns, mask, 1e-8)
        variance = moments.squares / moments.count.clamp(min=1)
        size = (moments.mean.square() + variance).sqrt()
        self.std.copy_(torch.maximum(variance.sqrt(), SMALLEST_STD * size))
        new_mean, new_std = moments.shift.double(), self.std.double()
        is_known = std > 0  # before the first update of the statistics, there are no values to keep
        weight.copy_(torch.where(is_known, std / new_std, 1).unsqueeze(-1) * weight)
        bias.copy_(torch.where(is_known, (std * bias + mean - new_mean) / new_std, bias))


class NormalizedReturns(ActorCriticAlgorithm):
    """Mixin that is listed before the actor-critic: `class NormalizedReturnsPPO(NormalizedReturns, PPO)`.

    The networks must have a linear layer `value_head`, as in `ActorCritic`. `preprocess_experience`
    must return an info with the value targets `target`, `[T, B]` or `[T, B, R]`.

    Args:
      arguments: settings of the actor-critic.

    Raises:
      UsageError: the networks have no linear layer `value_head` with a bias.
    """

    def __init__(self, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box, **arguments: Any):
        super().__init__(observation_spec, action_spec, reward_spec, **arguments)
        head = getattr(self.network, "value_head", None)
        if not isinstance(head, nn.Linear) or head.bias is None:
            raise UsageError(
                f"{type(self).__name__} rescales the critic's last layer, but {type(self.network).__name__}.value_head "
                "is not an nn.Linear with a bias; name the layer so, or use the algorithm without normalized returns"
            )
        self.network.value_head = NormalizedValueHead(head)

    def after_iteration(self, experience: Experience) -> None:
        super().after_iteration(experience)
        target = self.preprocess_experience(experience).info.target
        mask = trainable(experience.time_step.step_type)
        rows = target[: len(mask)].reshape(mask.numel(), -1)
        self.network.value_head.observe(rows, mask.reshape(-1))


@gin.configurable(module="alfish.algorithms")
@checked
class NormalizedReturnsPPO(NormalizedReturns, PPO):
    """PPO with normalized returns; see the module's docstring for the papers.

    Args:
      arguments: settings of `PPO`.
    """


@gin.configurable(module="alfish.algorithms")
@checked
class NormalizedReturnsA2C(NormalizedReturns, A2C):
    """A2C with normalized returns; see the module's docstring for the papers.

    Args:
      arguments: settings of `A2C`.
    """


@gin.configurable(module="alfish.algorithms")
@checked
class NormalizedReturnsAPPO(NormalizedReturns, APPO):
    """APPO with normalized returns; see the module's docstring for the papers.

    Args:
      arguments: settings of `APPO`.
    """
