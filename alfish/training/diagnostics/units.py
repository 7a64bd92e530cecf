"""Units that have stopped to do anything."""

from collections.abc import Callable

import gin
import torch
from torch import nn

from alfish.networks import CriticEnsemble
from alfish.networks.layers import ACTIVATIONS
from alfish.parameters import NonNegativeFloat, checked
from alfish.training.diagnostics.diagnostic import Diagnostic, LastUpdate, info_of, module_of, reading
from alfish.training.listener import Run
from alfish.writers import Shown

KINDS: tuple[type[nn.Module], ...]
KINDS = (*ACTIVATIONS.values(), nn.Tanh, nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Sigmoid)
CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d


@gin.configurable(module="alfish.training.diagnostics")
@checked
class DormantUnits(Diagnostic):
    """Fraction of the units of activation layers that are dormant in the last minibatch.

    A unit is dormant if its mean magnitude over the rows is at most `threshold` times the mean over its layer. A ReLU
    that is 0 everywhere is dormant at any threshold. Of convolutions a unit is a channel, and each critic of an
    ensemble has units of its own. Activations that are functions instead of modules are not seen.

    Args:
      threshold: fraction of the layer's mean; 0: only units that are 0 everywhere.

    Source: Sokar et al., 2023, https://arxiv.org/abs/2302.12902, definition 3.1.
    """

    def __init__(self, threshold: NonNegativeFloat = 0.025):
        self._threshold = threshold

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        dormant: dict[str, torch.Tensor] = {}  # [E, K] bool, by layer
        batch = update.batch
        with reading(run.algorithm):
            # A forward pass of its own: updates may be graphs, which have no hooks.
            modules = dict(run.algorithm.named_modules())
            in_ensembles = tuple(f"{name}.body." for name, each in modules.items() if isinstance(each, CriticEnsemble))
            with_images = {name.rpartition(".")[0] for name, each in modules.items() if isinstance(each, CONVOLUTIONS)}
            hooks = []
            for name, layer in modules.items():
                if not isinstance(layer, KINDS):
                    continue
                kind = _of_members if name.startswith(in_ensembles) else _of_features
                kind = _of_channels if name.rpartition(".")[0] in with_images else kind
                hooks.append(layer.register_forward_hook(self._reader(name, kind, dormant)))
            try:
                info_of(run.algorithm, batch.experience)
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

    def _reader(
        self, name: str, units: Callable[[torch.Tensor], torch.Tensor], dormant: dict[str, torch.Tensor]
    ) -> Callable[[nn.Module, object, torch.Tensor], None]:
        """Returns a hook that notes the dormant units of a layer.

        Args:
          name: of the layer.
          units: returns the units of its output as `[E, N, K]`, of E networks.
          dormant: receives them.
        """

        def read(layer: nn.Module, arguments: object, output: torch.Tensor) -> None:
            mean = units(output).abs().float().mean(1)
            here = mean <= self._threshold * mean.mean(1, keepdim=True)
            # A layer that runs more than once, over several sets of rows, is dormant where it is so in all of them. A
            # pass may run the first networks only.
            found = dormant.setdefault(name, here)
            both = min(len(found), len(here))
            longer = found if len(found) > both else here
            dormant[name] = torch.cat([found[:both] & here[:both], longer[both:]])

        return read


def _of_features(output: torch.Tensor) -> torch.Tensor:
    return output.reshape(1, -1, output.shape[-1])


def _of_members(output: torch.Tensor) -> torch.Tensor:
    return output.flatten(1, -2)


def _of_channels(output: torch.Tensor) -> torch.Tensor:
    return _of_features(output.movedim(1, -1) if output.ndim > 3 else output)


def _fraction(units: list[torch.Tensor]) -> float:
    return float(torch.cat([each.flatten() for each in units]).float().mean())
