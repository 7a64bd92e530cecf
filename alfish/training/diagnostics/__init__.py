"""Diagnostics: statistics of networks and rows for summaries, computed periodically during training.

A diagnostic has no side effects: it does not change the run's random numbers or updates.
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
