"""Checks the arguments of classes and functions against their annotations.

    @gin.configurable(module="alfish")
    @checked
    class PPO(RLAlgorithm):
        def __init__(self, ..., gamma: UnitInterval = 0.99, num_layers: PositiveInt = 2, mode: Literal["a", "b"] = "a"):

`PPO(..., gamma=1.5)` raises "PPO.gamma is 1.5; it must be a number in [0, 1]", and reading the binding in a gin file
raises the same error. Defaults are not checked. If the annotation is a class of alfish, objects of any class are
accepted, but plain values (such as a number, a list or text) and classes are refused.
"""

import collections.abc
import functools
import inspect
import typing
from typing import Any, TypeVar

from alfish.errors import UsageError
from alfish.parameters.kinds import SEQUENCES, bare, elements, is_number, members, mistake, shown, values_of

MAPPINGS = (collections.abc.Mapping, dict)

T = TypeVar("T")


def checked(thing: T) -> T:
    """Decorates a class or function so that each call checks its arguments against their annotations.

    A float with an integer value (1e6) becomes an int if the annotation is int. 0 and 1 become a bool if the annotation
    is bool.

    Raises:
      UsageError: raised by the decorated call, if an argument is not of the annotated kind, or is outside its range.
    """
    if not inspect.isclass(thing):
        return _checked(thing, thing.__name__)  # type: ignore[attr-defined]
    setattr(thing, "__init__", _checked(thing.__init__, thing.__name__))  # noqa: B010
    return thing


def _checked(function: Any, owner: str) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            bound = signature.bind(*arguments, **keywords)
        except TypeError:
            return function(*arguments, **keywords)  # raises Python's own TypeError
        annotations = hints(function)
        for name, value in bound.arguments.items():
            if name in annotations:
                words = mistake(value, annotations[name])
                if words is not None:
                    raise UsageError(f"{owner}.{name} is {shown(value)}; {words}")
                bound.arguments[name] = _whole(value, members(annotations[name]))
        return function(*bound.args, **bound.kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


@functools.cache
def hints(function: Any) -> dict[str, Any]:
    """Returns the annotations of a function's parameters; empty if they cannot be read."""
    try:
        found = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [name for name, one in inspect.signature(function).parameters.items() if one.kind not in variable]
    return {name: found[name] for name in named if name in found}


def _whole(value: Any, kinds: list[Any]) -> Any:
    """Returns an int for a float if an int is declared, and a bool for 0 or 1 if a bool is declared."""
    kinds = list(map(bare, kinds))
    if bool in kinds and is_number(value):
        return bool(value)
    if int in kinds and float not in kinds and is_number(value) and float(value).is_integer():
        return int(value)
    if type(value) in (list, tuple) or "float" in str(getattr(value, "dtype", "")):
        parts = [part for kind in kinds if typing.get_origin(kind) in SEQUENCES for part in elements(kind)]
        if int not in map(bare, parts) and type(value) not in (list, tuple):
            return value
        made = type(value) if isinstance(value, (list, tuple)) else list  # arrays and tensors become lists
        return made(_whole(one, parts) for one in value) if parts else value
    if type(value) is dict:
        parts = [part for kind in kinds if typing.get_origin(kind) in MAPPINGS for part in values_of(kind)]
        return {key: _whole(one, parts) for key, one in value.items()} if parts else value
    return value
