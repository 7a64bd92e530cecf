"""States of the user's vector environments and of their random generators, as a checkpoint holds them."""

import json
from typing import Any, TypeAlias

import numpy as np

from alfish.nest import Nest
from alfish.runs.checkpoint_file import check_loadable
from alfish.user_code import calling

Generator: TypeAlias = np.random.Generator | np.random.RandomState


def state_of(env: Any, name: str) -> Nest:
    """Returns the state of a vector environment that has a method `get_state`."""
    with calling(f"{name}.get_state"):
        return env.get_state()


def check_state(env: Any, name: str) -> None:
    """Raises UsageError if the state of a vector environment has a leaf that a checkpoint cannot hold."""
    if hasattr(env, "get_state"):
        check_loadable(state_of(env, name), f"{name}.get_state()")


def to_json(generator: Generator) -> str:
    """Returns the state of a random generator."""
    state: Any
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    return json.dumps(state, default=np.ndarray.tolist)


def from_json(generator: Generator, state: str) -> None:
    """Restores the state of a random generator of the same kind."""
    if isinstance(generator, np.random.RandomState):
        generator.set_state(json.loads(state))
    else:
        generator.bit_generator.state = json.loads(state)
