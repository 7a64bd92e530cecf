"""Explained variance of values."""

import gin
import torch

from alfish.parameters import checked
from alfish.training.diagnostics.diagnostic import Diagnostic, LastUpdate, info_of, reading, value_estimates
from alfish.training.listener import Run
from alfish.writers import Shown


@gin.configurable(module="alfish.training.diagnostics")
@checked
class ExplainedVariance(Diagnostic):
    """Explained variance of the value in the last minibatch, after its update: 1 - Var(target - value) / Var(target).

    1 is perfect, 0 is as good as a constant, and less is worse. It is shown for algorithms whose rows have a target of
    the value (PPO, A2C, APPO); `MonteCarlo` measures the values of others.
    """

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        batch, algorithm = update.batch, run.algorithm
        experience = batch.experience
        target = getattr(getattr(experience.info, "algorithm", experience.info), "target", None)
        if not isinstance(target, torch.Tensor):
            return {}
        with reading(algorithm):
            info = info_of(algorithm, experience)
        value = value_estimates(algorithm, info).get("value")
        if value is None:
            return {}
        mask = batch.mask[: len(value)]
        value, target = value[mask].double(), target[: len(value)][mask].double()
        variance = target.var(0, correction=0)
        explained = 1 - (target - value).var(0, correction=0) / variance.clamp(min=1e-12)
        return {"values/explained_variance": float(explained.mean())}
