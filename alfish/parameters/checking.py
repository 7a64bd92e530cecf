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
import contextlib
import functools
import inspect
import numbers
import typing
import weakref
from pathlib import Path
from typing import Any, TypeVar

from alfish.errors import UsageError
from alfish.parameters.kinds import SEQUENCES, bare, elements, is_number, members, mistake, shown, values_of

MAPPINGS = (collections.abc.Mapping, dict)

T = TypeVar("T")

# For each object of a checked class whose arguments a configuration can have: the constructor, and the arguments.
_CONSTRUCTIONS: weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()


def checked(thing: T) -> T:
    """Decorates a class or function so that each call checks its arguments against their annotations.

    A float with an integer value (1e6) becomes an int if the annotation is int. 0 and 1 become a bool if the annotation
    is bool.

    Raises:
      UsageError: raised by the decorated call, if an argument is not of the annotated kind, or is outside its range.
    """
    if not inspect.isclass(thing):
        return _checked(thing, thing.__name__)  # type: ignore[attr-defined]
    setattr(thing, "__init__", _checked(thing.__init__, thing.__name__, is_constructor=True))  # noqa: B010
    return thing


def construction(thing: Any) -> dict[str, Any] | None:
    """Returns the arguments that construct an object of the same class again, by parameter name.

    The result is None if the constructor is not checked, or if an argument is an object without such arguments.
    """
    try:
        constructor, arguments = _CONSTRUCTIONS[thing]
    except (KeyError, TypeError):  # TypeError if the object cannot be hashed or referred to weakly
        return None
    # A subclass whose constructor is not checked may have other parameters than its checked base class.
    return arguments if inspect.unwrap(type(thing).__init__) is constructor else None


def _checked(function: Any, owner: str, is_constructor: bool = False) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        bound = None
        with contextlib.suppress(TypeError):
            bound = signature.bind(*arguments, **keywords)
        if bound is None:
            return function(*arguments, **keywords)  # raises Python's own TypeError
        annotations = hints(function)
        for name, value in bound.arguments.items():
            if name in annotations:
                words = mistake(value, annotations[name])
                if words is not None:
                    raise UsageError(f"{owner}.{name} is {shown(value)}; {words}")
                bound.arguments[name] = _whole(value, members(annotations[name]))
        result = function(*bound.args, **bound.kwargs)
        if is_constructor:
            _record(function, bound)
        return result

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _record(constructor: Any, call: inspect.BoundArguments) -> None:
    """Records the call of a constructor, if a configuration can have its arguments; others may be large."""
    (_, made), *arguments = call.arguments.items()
    # A constructor returns after that of its base class, so its arguments replace those of the base class.
    if all(_is_writable(value) for _, value in arguments):
        with contextlib.suppress(TypeError):  # the object cannot be hashed or referred to weakly
            _CONSTRUCTIONS[made] = constructor, dict(arguments)


def _is_writable(value: Any) -> bool:
    if value is None or isinstance(value, (bool, numbers.Number, str, Path, functools.partial)):
        return True
    if isinstance(value, (list, tuple)):
        return all(map(_is_writable, value))
    if isinstance(value, dict):
        return all(map(_is_writable, value.values()))
    return inspect.isclass(value) or inspect.isfunction(value) or construction(value) is not None


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
