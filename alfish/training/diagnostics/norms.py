"""Norms of modules: parameters, gradients, and the step of the last update."""

from collections.abc import Mapping

import gin
import torch

from alfish.parameters import PositiveInt, checked
from alfish.training.diagnostics.diagnostic import Diagnostic, LastUpdate, module_of
from alfish.training.listener import Run
from alfish.writers import Shown


@gin.configurable(module="alfish.training.diagnostics")
@checked
class ModuleNorms(Diagnostic):
    """Norms of each trained module's parameters, of their gradient, and of the last update's step.

    The gradient is that of the last minibatch at the parameters after its update, before clipping. The step is
    relative: the norm of the change by the norm of the parameters. 0.001 is usual; 0.1 is too long, 1e-6 trains little.

    Args:
      depth: parts of a parameter's name that make its module: 2 makes `critic.mlp` of `critic.mlp.0.weight`.
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
