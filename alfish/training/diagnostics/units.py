"""Units that have stopped to do anything."""

from collections.abc import Callable

import gin
import torch
from torch import nn

from alfish.networks.layers import ACTIVATIONS
from alfish.parameters import NonNegativeFloat, checked
from alfish.training.diagnostics.diagnostic import Diagnostic, LastUpdate, module_of, reading
from alfish.training.listener import Run
from alfish.writers import Shown

KINDS: tuple[type[nn.Module], ...]
KINDS = (*ACTIVATIONS.values(), nn.Tanh, nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Sigmoid)


@gin.configurable(module="alfish.training.diagnostics")
@checked
class DormantUnits(Diagnostic):
    """Fraction of the units of activation layers that are dormant in the last minibatch.

    A unit is dormant if its mean magnitude over the rows is at most `threshold` times the mean over its layer. A ReLU
    that is 0 everywhere is dormant at any threshold. Of convolutions a unit is a channel. Activations
    that are functions instead of modules are not seen.

    Args:
      threshold: fraction of the layer's mean; 0: only units that are 0 everywhere.

    Source: Sokar et al., 2023, https://arxiv.org/abs/2302.12902, definition 3.1.
    """

    def __init__(self, threshold: NonNegativeFloat = 0.025):
        self._threshold = threshold

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        dormant: dict[str, torch.Tensor] = {}  # [K] bool, by layer
        batch = update.batch
        with reading(run.algorithm):
            # A forward pass of its own: updates may be graphs, which have no hooks.
            layers = {name: module for name, module in run.algorithm.named_modules() if isinstance(module, KINDS)}
            hooks = [layer.register_forward_hook(self._reader(name, dormant)) for name, layer in layers.items()]
            try:
                run.algorithm.train_step(batch.experience, batch.experience.state)
            finally:
                for hook in hooks:
                    hook.remove()
        if not dormant:
            return {}
        by_part: dict[str, list[torch.Tensor]] = {}
        for name, units in dormant.items():
            by_part.setdefault(module_of(name, 2), []).append(units)
        shown: dict[str, Shown] = {f"dormant_units/{part}": _fraction(units) for part, units in by_part.items()}
        return shown | {"dormant_units/all": _fraction(list(dormant.values()))}

    def _reader(self, name: str, dormant: dict[str, torch.Tensor]) -> Callable[[nn.Module, object, torch.Tensor], None]:
        def read(layer: nn.Module, arguments: object, output: torch.Tensor) -> None:
            images = output.ndim >= 4 and output.shape[-1] == output.shape[-2] and output.shape[-1] > 1
            units = output.abs().movedim(-3, -1) if images else output.abs()
            mean = units.reshape(-1, units.shape[-1]).float().mean(0)
            here = mean <= self._threshold * mean.mean()
            # A layer that runs more than once, over several sets of rows, is dormant where it is so in all of them.
            dormant[name] = dormant[name] & here if name in dormant else here

        return read


def _fraction(units: list[torch.Tensor]) -> float:
    return float(torch.cat(units).float().mean())
