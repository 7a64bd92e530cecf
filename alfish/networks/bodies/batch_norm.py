"""Batch norm for pure hooks: a forward pass does not write running statistics.

The argument `moments`, not `Module.training`, selects the statistics of a pass, because one update uses both kinds of
statistics. Without `Moments`, a pass uses the running statistics. With `Moments`, it uses the statistics of its batch,
with gradients. The moments then collect new running statistics, which `calc_loss` returns as `LossInfo.buffers`.
"""

from typing import Annotated

import gin
import torch
from torch import nn

from alfish.errors import UsageError
from alfish.parameters import PositiveFloat, PositiveInt, Range, checked


class Moments(dict[torch.Tensor, torch.Tensor]):
    """Makes a pass use the statistics of its batch, and collects the new running statistics.

    The dict maps the buffers of the layers to their new values. If a layer makes several passes, the last pass counts.
    """


@gin.configurable(module="alfish.networks", denylist=["size", "ensemble_size"])
@checked
class BatchNorm(nn.Module):
    """Normalizes each feature over the rows of a batch, or by running statistics.

        y = weight (x - mean) / sqrt(variance + eps) + bias
        running <- running + rate (batch - running)                     see `Moments`

    Variances are biased, in the pass and in the running statistics.

    When frozen (`Learner.frozen_parts`), the layer uses the running statistics in all passes, and does not change them.

    Args:
      size: number of features.
      ensemble_size: number E of networks with separate statistics, for inputs `[E, N, size]`, or shared inputs
        `[N, size]`; None means one network, for inputs `[..., size]`.
      rate: step size of the running statistics, in (0, 1].
      eps: number added to the variance.

    Source: Ioffe & Szegedy, 2015, https://arxiv.org/abs/1502.03167.
    """

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(
        self,
        size: PositiveInt,
        ensemble_size: PositiveInt | None = None,
        rate: Annotated[float, Range(0, 1, above=True)] = 0.01,
        eps: PositiveFloat = 1e-3,
    ):
        super().__init__()
        shape = (size,) if ensemble_size is None else (ensemble_size, 1, size)
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self._is_ensemble, self._is_frozen = ensemble_size is not None, False
        self._rate, self._eps = rate, eps

    def freeze(self) -> None:
        """Makes all later passes use the running statistics."""
        self._is_frozen = True

    def forward(self, x: torch.Tensor, moments: Moments | None = None, num_members: int | None = None) -> torch.Tensor:
        """Returns the normalized features.

        Args:
          x: inputs; see the class for their shape.
          moments: collector of statistics; the pass then uses the statistics of its batch. None means running
            statistics.
          num_members: number of networks to compute, from the first; None means all E.
        """
        members = slice(num_members)
        weight, bias = self.weight[members], self.bias[members]
        if moments is None or self._is_frozen:
            mean, variance = self.mean[members], self.variance[members]
            return (x - mean) * (weight / (variance + self._eps).sqrt()) + bias
        rows = -2 if self._is_ensemble else tuple(range(x.ndim - 1))
        mean = x.mean(rows, keepdim=True)
        centered = x - mean
        variance = centered.square().mean(rows, keepdim=True)
        for running, batch in ((self.mean, mean), (self.variance, variance)):
            new = running.detach() + self._rate * (batch.detach() - running.detach())
            moments[running] = new.reshape(running.shape)
        return centered * (weight / (variance + self._eps).sqrt()) + bias


def check_batch_norms(owner: nn.Module) -> None:
    """Raises UsageError if running statistics of a batch norm of `owner` would never change.

    The tuple `updates_batch_norms` of a module names the submodules that it calls with `Moments`.
    """
    users = tuple(
        f"{name}.{part}.".lstrip(".")
        for name, module in owner.named_modules()
        for part in getattr(module, "updates_batch_norms", ())
    )
    for name, module in owner.named_modules():
        if isinstance(module, BatchNorm) and not f"{name}.".startswith(users):
            raise UsageError(
                f"{name} of {type(owner).__name__} is a batch norm whose running statistics are never updated: only "
                "CrossQ, XQC and FlashSAC update them, in actor_mlp and in the hidden layers of their critics. Set "
                "norm to 'layer' or None, or use another network"
            )


def has_batch_norm(module: nn.Module) -> bool:
    """Returns whether a layer of the module is a batch norm."""
    return any(isinstance(each, BatchNorm) for each in module.modules())
