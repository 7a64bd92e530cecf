"""Temperatures of soft policies, which weigh a policy's entropy against rewards."""

import math
from typing import Any, Literal

import gin
import torch
from torch import nn

from alfish.functional.distributions import sum_of
from alfish.functional.values import Scalar
from alfish.networks.hybrid import HybridSpace
from alfish.parameters import FiniteFloat, PositiveFloat, UnitInterval, checked


@gin.configurable(module="alfish.networks", allowlist=["linear_in"])
@checked
class Temperatures(nn.Module):
    """One temperature alpha for each part of an action, Box and Discrete.

    Args:
      space: space of the actions.
      initial: temperature at the start.
      learned: whether temperatures are learned, so that entropies approach their targets.
      box_target: target entropy of the Box part, in nats; None means minus the number of Box entries.
      discrete_fraction: target entropy of the Discrete part, as a fraction in [0, 1] of the maximum.
      linear_in: variable in which the loss is linear: 'alpha', as in the paper, or 'log_alpha'. With 'alpha', the
        gradient is proportional to alpha, and Adam divides by the root mean square of earlier gradients. Alpha then
        rises faster and falls more slowly.

    Attributes:
      log_alpha: log temperatures by part, 0-d parameters.
    """

    def __init__(
        self,
        space: HybridSpace,
        initial: PositiveFloat,
        learned: bool,
        box_target: FiniteFloat | None,
        discrete_fraction: UnitInterval,
        linear_in: Literal["alpha", "log_alpha"] = "log_alpha",
    ):
        super().__init__()
        self.learned = learned
        self._in_log = linear_in == "log_alpha"
        self._num_choices = space.num_choices
        self._targets: dict[str, Any] = space.target_entropies(box_target, discrete_fraction)
        logs = {kind: torch.tensor(math.log(initial)) for kind in self._targets}
        self.log_alpha = nn.ParameterDict({kind: nn.Parameter(log, learned) for kind, log in logs.items()})

    def soft(self, values: Scalar, q: torch.Tensor, entropies: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the value with a bonus for entropy: V = E[Q] + sum of alpha H over the parts of the action.

        H of the Box part is estimated by -log pi(a) of the drawn action, so V = Q - alpha log pi(a).

        Args:
          values: value representation of the critics.
          q: action value of each row, `[..., K]`.
          entropies: entropy `[...]` of each part.
        """
        for part, entropy in entropies.items():
            alpha = self.log_alpha[part].exp().detach()  # alpha has a separate loss
            q = values.with_bonus(q, alpha * entropy)
        return q

    def loss(self, entropies: dict[str, torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the loss `[...]`: the sum over the parts of w (entropy - target entropy), w = alpha or log alpha.

        Args:
          entropies: entropy `[...]` of each part.
          mask: allowed Discrete choices, `[..., n]` bool; None means all. The target entropy is a fraction of the
            maximal entropy of the allowed choices.
        """
        targets = self._targets
        if mask is not None:
            maximum = mask.sum(-1).clamp(min=1).log() / math.log(self._num_choices)
            targets = targets | {"discrete": targets["discrete"] * maximum}
        weights = {kind: log if self._in_log else log.exp() for kind, log in self.log_alpha.items()}
        return sum_of(weights[kind] * (entropy - targets[kind]).detach() for kind, entropy in entropies.items())

    def shown(self, entropies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns temperatures, and the entropies of the parts that exist, for summaries."""
        found = {f"entropy_{kind}": entropy for kind, entropy in entropies.items()}
        return found | {f"alpha_{kind}": self.log_alpha[kind].exp() for kind in self._targets}
