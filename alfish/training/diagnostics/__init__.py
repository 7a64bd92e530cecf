"""Diagnostics: what summaries show of networks and rows, computed from time to time beside training.

A diagnostic only reads. It draws no number from the run's generators, and adds no operation to an update.
"""

from alfish.training.diagnostics.diagnostic import Diagnostic, LastUpdate, value_estimates
from alfish.training.diagnostics.histograms import Histograms
from alfish.training.diagnostics.monte_carlo import MonteCarlo
from alfish.training.diagnostics.norms import ModuleNorms
from alfish.training.diagnostics.phases import PhaseTimes
from alfish.training.diagnostics.units import DormantUnits
from alfish.training.diagnostics.values import ExplainedVariance

__all__ = [
    "Diagnostic",
    "DormantUnits",
    "ExplainedVariance",
    "Histograms",
    "LastUpdate",
    "ModuleNorms",
    "MonteCarlo",
    "PhaseTimes",
    "value_estimates",
]
