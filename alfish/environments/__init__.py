"""Environments: gymnasium's vector environments, and ones that return torch tensors, become the stream of time steps.

`terminated`, `truncated` and autoreset modes exist in this folder and nowhere past it; `offline` is the other door.
"""

from alfish.environments.environment import Environment
from alfish.environments.make import make_environment
from alfish.environments.tensor import TensorEnvironment
from alfish.environments.vector import VectorEnvironment

__all__ = ["Environment", "TensorEnvironment", "VectorEnvironment", "make_environment"]
