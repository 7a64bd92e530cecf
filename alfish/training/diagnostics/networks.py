"""Diagnostics of networks: histograms, norms of parameters, gradient noise, and dormant units."""

from collections.abc import Callable, Mapping

import gin
import torch
from torch import nn

from alfish import nest
from alfish.data import StepType
from alfish.errors import UsageError
from alfish.learner.batches.batches import take
from alfish.networks import CriticEnsemble
from alfish.networks.layers import ACTIVATIONS
from alfish.parameters import NonNegativeFloat, PositiveInt, checked
from alfish.runs.writers import Histogram, Shown
from alfish.training.diagnostics.diagnostic import Diagnostic, LastUpdate, info_of, module_of, reading
from alfish.training.listener import Run


@gin.configurable(module="alfish.training.diagnostics")
@checked
class Histograms(Diagnostic):
    """Histograms of the actions and observations in the last minibatch, one for each leaf.

    Actions are in the algorithm's units: Box entries are in [-1, 1]. Observations are shown after transforms.

    Args:
      observations: whether to show observations.
    """

    def __init__(self, observations: bool = True):
        self._observations = observations

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        experience, mask = update.batch.experience, update.batch.mask
        shown: dict[str, Shown] = {}
        for name, leaf in nest.named_leaves(experience.action, "action"):
            shown[f"histogram/{name}"] = Histogram.of(leaf[: len(mask)][mask])
        if self._observations:
            step = experience.time_step
            is_row = step.step_type != StepType.PAD
            for name, leaf in nest.named_leaves(step.observation, "observation"):
                shown[f"histogram/{name}"] = Histogram.of(leaf[is_row])
        return shown


@gin.configurable(module="alfish.training.diagnostics")
@checked
class ModuleNorms(Diagnostic):
    """Norms of the parameters and the gradient of each trained module, and the size of its last update.

    The gradient is computed on the last minibatch, with the parameters after the update, without clipping. The size of
    an update is the norm of the change of parameters, divided by the norm of the parameters. A size of 0.001 is usual,
    0.1 is too large, and with 1e-6 a module hardly learns.

    Args:
      depth: number of leading parts of a parameter's name that are the name of its module: with 2,
        `critic.mlp.0.weight` belongs to `critic.mlp`.
    """

    def __init__(self, depth: PositiveInt = 2):
        self._depth = depth

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        parameters = {name: p.detach() for name, p in run.algorithm.named_parameters() if name in update.before}
        norms = self._norms(parameters)
        steps = self._norms({name: value - update.before[name] for name, value in parameters.items()})
        gradients = self._norms(run.learner.gradients(update.batch))
        shown: dict[str, Shown] = {f"parameter_norm/{name}": norm for name, norm in norms.items()}
        shown |= {f"gradient_norm/{name}": norm for name, norm in gradients.items()}
        return shown | {f"update_size/{name}": step / max(norms[name], 1e-12) for name, step in steps.items()}

    def _norms(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
        by_module: dict[str, list[torch.Tensor]] = {}
        for name, tensor in tensors.items():
            by_module.setdefault(module_of(name, self._depth), []).append(torch.linalg.vector_norm(tensor.float()))
        if not by_module:
            return {}
        norms = torch.stack([torch.linalg.vector_norm(torch.stack(own)) for own in by_module.values()])
        return dict(zip(by_module, norms.tolist()))


@gin.configurable(module="alfish.training.diagnostics")
@checked
class GradientNoise(Diagnostic):
    """Gradient noise scale of each trained module: the minibatch size above which larger minibatches hardly help.

    The scale is tr(C) / |G|^2, in rows, where G is the mean gradient and C is the covariance of the gradient of one
    row. A much smaller minibatch needs more updates for the same progress. A much larger minibatch needs more rows.

    The last minibatch is split into parts. The gradient of each part is computed with the parameters after the update,
    and compared with the mean of these gradients. The estimates of tr(C) and |G|^2 are unbiased if rows are
    independent. Both estimates vary much: average each estimate over several measurements, then divide the averages. If
    a loss normalizes over the minibatch, for example advantages, it normalizes over each part instead. A measurement
    takes `num_parts` backward passes, so this diagnostic is not a default.

    Args:
      num_parts: number of equal parts into which the minibatch is split, at least 2. If the minibatch has fewer
        columns, nothing is measured.
      depth: number of leading parts of a parameter's name that are the name of its module, see `ModuleNorms`.

    Source: McCandlish et al., 2018, https://arxiv.org/abs/1812.06162, appendix A.1.
    """

    def __init__(self, num_parts: PositiveInt = 8, depth: PositiveInt = 1):
        if num_parts < 2:
            raise UsageError(f"GradientNoise.num_parts is {num_parts}; at least 2 gradients are compared")
        self._num_parts, self._depth = num_parts, depth

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        size = update.batch.mask.shape[1] // self._num_parts  # columns of a part
        if size == 0:
            return {}
        columns = torch.arange(size * self._num_parts, device=update.batch.mask.device).split(size)
        parts = [part for part in (take(update.batch, index) for index in columns) if part.mask.any()]
        if len(parts) < 2:
            return {}
        gradients = [self._by_module(run.learner.gradients(part)) for part in parts]
        length = run.learner.num_loss_rows(parts[0])
        num_rows = float(torch.stack([part.mask[:length].sum() for part in parts]).float().mean())
        shown: dict[str, Shown] = {}
        for name in gradients[0]:
            each = torch.stack([gradient[name] for gradient in gradients]).double()
            trace = num_rows * float(each.var(0).sum())
            squared_norm = float(each.mean(0).square().sum()) - trace / (num_rows * len(parts))
            shown |= {f"gradient_variance/{name}": trace, f"gradient_squared_norm/{name}": squared_norm}
            if squared_norm > 0:  # the estimate may be negative if the gradient is small
                shown[f"gradient_noise_scale/{name}"] = trace / squared_norm
        return shown

    def _by_module(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        by_module: dict[str, list[torch.Tensor]] = {}
        for name, gradient in gradients.items():
            by_module.setdefault(module_of(name, self._depth), []).append(gradient.flatten())
        return {name: torch.cat(own) for name, own in by_module.items()}


KINDS: tuple[type[nn.Module], ...]
KINDS = (*ACTIVATIONS.values(), nn.Tanh, nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Sigmoid)
CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d


@gin.configurable(module="alfish.training.diagnostics")
@checked
class DormantUnits(Diagnostic):
    """Fraction of the units of activation layers that are dormant in the last minibatch.

    A unit is dormant if its mean magnitude over the rows is at most `threshold` times the mean magnitude over its
    layer. A ReLU whose output is 0 in all rows is dormant at any threshold. In a convolution, a unit is a channel. The
    critics of an ensemble have separate units. Only activations that are modules are measured, not activation
    functions.

    Args:
      threshold: fraction of the layer's mean up to which a unit is dormant; 0 counts only units whose output is always
        0.

    Source: Sokar et al., 2023, https://arxiv.org/abs/2302.12902, definition 3.1.
    """

    def __init__(self, threshold: NonNegativeFloat = 0.025):
        self._threshold = threshold

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        dormant: dict[str, torch.Tensor] = {}  # `[E, K]` bool, by layer
        batch = update.batch
        with reading(run.algorithm):
            # A separate forward pass is needed, because compiled updates do not call module hooks.
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
        """Returns a hook that records the dormant units of a layer.

        Args:
          name: name of the layer.
          units: function that reshapes the layer's output to units `[E, N, K]`, for E networks.
          dormant: dict that receives the dormant units.
        """

        def read(layer: nn.Module, arguments: object, output: torch.Tensor) -> None:
            mean = units(output).abs().float().mean(1)
            here = mean <= self._threshold * mean.mean(1, keepdim=True)
            # If a layer is called several times, a unit is dormant only if it is dormant in all calls. A call may
            # compute only the first networks of an ensemble.
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
