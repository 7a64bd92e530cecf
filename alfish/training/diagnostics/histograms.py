"""Histograms of actions and observations."""

import gin

from alfish import nest
from alfish.data import StepType
from alfish.parameters import checked
from alfish.training.diagnostics.diagnostic import Diagnostic, LastUpdate
from alfish.training.listener import Run
from alfish.writers import Histogram, Shown


@gin.configurable(module="alfish.training.diagnostics")
@checked
class Histograms(Diagnostic):
    """Histograms of the actions and observations in the last minibatch, one for each leaf.

    Actions are in the algorithm's units, Box entries in [-1, 1]. Observations are those that networks receive, after
    transforms.

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
