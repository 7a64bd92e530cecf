"""The decorator that checks the arguments of a class or function against their annotations.

    @gin.configurable(module="alfish")
    @checked
    class PPO(RLAlgorithm):
        def __init__(self, ..., gamma: UnitInterval = 0.99, num_layers: PositiveInt = 2, mode: Literal["a", "b"] = "a"):

`PPO(..., gamma=1.5)` raises "PPO.gamma is 1.5; it is a number in [0, 1]", and so does the binding, when gin reads it.
Defaults are not checked. Of values that are not plain, only classes in the place of objects are refused.
"""

import functools
import inspect
import typing
from typing import Any, TypeVar

from alfish.errors import UsageError
from alfish.parameters.kinds import SEQUENCES, bare, elements, is_number, members, mistake, shown

T = TypeVar("T")


def checked(thing: T) -> T:
    """Decorator of classes and functions: checks the arguments of each call against their annotations.

    A whole number that is given as a float (1e6) becomes an int where the annotation is an int, and 0 or 1 a bool where
    it is a bool.

    Raises:
      UsageError: when called: an argument is of another kind than its annotation, or not in its range.
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
            return function(*arguments, **keywords)  # which raises it, in Python's own words
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
    """The annotations of a function's parameters; none, where they cannot be read."""
    try:
        found = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [name for name, one in inspect.signature(function).parameters.items() if one.kind not in variable]
    return {name: found[name] for name in named if name in found}


def _whole(value: Any, kinds: list[Any]) -> Any:
    """An int for a float where an int is declared, and a bool for 0 or 1 where a bool is."""
    kinds = list(map(bare, kinds))
    if bool in kinds and is_number(value):
        return bool(value)
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        return int(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        parts = [part for kind in kinds if typing.get_origin(kind) in SEQUENCES for part in elements(kind)]
        return type(value)(_whole(one, parts) for one in value) if parts else value
    return value
