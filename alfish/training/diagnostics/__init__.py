"""Diagnostics: statistics of networks and rows for summaries, computed from time to time in addition to training.

A diagnostic has no side effects. It does not draw from the run's generators, and does not add operations to an update.
"""

from alfish.training.diagnostics.diagnostic import Diagnostic, LastUpdate, PhaseTimes, value_estimates
from alfish.training.diagnostics.estimates import ExplainedVariance, MonteCarlo
from alfish.training.diagnostics.networks import DormantUnits, GradientNoise, Histograms, ModuleNorms

__all__ = [
    "Diagnostic",
    "DormantUnits",
    "ExplainedVariance",
    "GradientNoise",
    "Histograms",
    "LastUpdate",
    "ModuleNorms",
    "MonteCarlo",
    "PhaseTimes",
    "value_estimates",
]
