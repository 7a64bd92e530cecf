"""Environments: converts vector environments, of numpy arrays or torch tensors, to streams of time steps.

`terminated`, `truncated` and autoreset modes occur only in this package and in `offline`.
"""

from alfish.environments.environment import EncodedEnvironment, Environment
from alfish.environments.functional import FunctionalEnvironment
from alfish.environments.make import make_environment
from alfish.environments.simulator import Simulator, SimulatorEnvironment, SimulatorStep
from alfish.environments.tensor import TensorEnvironment
from alfish.environments.vector import VectorEnvironment

__all__ = [
    "EncodedEnvironment",
    "Environment",
    "FunctionalEnvironment",
    "Simulator",
    "SimulatorEnvironment",
    "SimulatorStep",
    "TensorEnvironment",
    "VectorEnvironment",
    "make_environment",
]
