"""Kinds and ranges of parameters: declared by annotations, checked whenever a class or function is called.

    @gin.configurable(module="alfish")
    @checked
    class PPO(RLAlgorithm):
        def __init__(self, ..., gamma: UnitInterval = 0.99, num_layers: PositiveInt = 2, mode: Literal["a", "b"] = "a"):

`PPO(..., gamma=1.5)` raises "PPO.gamma is 1.5; it is a number in [0, 1]", and so does the binding, when gin reads it.
Defaults are not checked. Of values that are not plain, only classes in the place of objects are refused.
"""

import collections.abc
import functools
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from alfish.errors import UsageError

T = TypeVar("T")


class Range(NamedTuple):
    """The numbers from `low` to `high`.

    Attributes:
      low, high: ends, part of the range unless `above` or `below` excludes them; infinity is never part of it.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: object) -> bool:
        number: Any = value if isinstance(value, numbers.Real) else float(value)  # type: ignore[arg-type]
        is_low = number <= self.low if self.above else number < self.low
        is_high = number >= self.high if self.below else number > self.high
        return math.isfinite(number) and not is_low and not is_high

    def words(self, noun: str) -> str:
        """What is in it: `noun` is 'number' or 'whole number'."""
        if math.isinf(self.low) and math.isinf(self.high):
            return f"a {'finite ' * (noun == 'number')}{noun}"
        if math.isinf(self.high):
            return f"a positive {noun}" if self == POSITIVE else f"a {noun} {self._least()}"
        if math.isinf(self.low):
            return f"a {noun} {'below' if self.below else 'of at most'} {self.high}"
        return f"a {noun} in {'[('[self.above]}{self.low}, {self.high}{'])'[self.below]}"

    def _least(self) -> str:
        return f"{'above' if self.above else 'of at least'} {self.low}"


POSITIVE = Range(0, above=True)

FiniteFloat = Annotated[float, Range()]
PositiveFloat = Annotated[float, POSITIVE]
NonNegativeFloat = Annotated[float, Range(0)]
UnitInterval = Annotated[float, Range(0, 1)]
OpenUnitInterval = Annotated[float, Range(0, 1, above=True, below=True)]
Rate = Annotated[float, Range(0, 1, above=True)]
PositiveInt = Annotated[int, Range(1)]
LayerSize = Annotated[int, Range(1, 10**6)]  # features of a layer; more is a mistake, and would take all memory
NonNegativeInt = Annotated[int, Range(0)]

PLAIN = (numbers.Number, str, bytes, bool, NoneType, os.PathLike, list, tuple, dict, set)
SEQUENCES = (collections.abc.Sequence, list, tuple)
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text in quotes",
    Path: "text in quotes",
    collections.abc.Callable: "a reference (@...)",
    collections.abc.Mapping: "a dict",
    NoneType: "None",
}
# Whether a reference is of a kind; None: the value is no reference. gin's values have them.
Refers = Callable[[Any, Any], "bool | None"]


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


def mistake(value: Any, annotation: Any, refers: Refers = lambda value, kind: None) -> str | None:
    """What a parameter takes, where it does not take this value; None, where it does, or may."""
    kinds = members(annotation)
    if not any(_fits(value, kind, refers) for kind in kinds):
        return wanted(value, kinds, refers)
    if refers(value, Any) is None and callable(value) and not inspect.isclass(value):
        return _schedule_mistake(value, kinds)
    return None


def _schedule_mistake(schedule: Callable[..., Any], kinds: list[Any]) -> str | None:
    """What the values of a schedule of progress are to be, where it begins or ends with another."""
    for kind in kinds:
        for one in ranges_of(kind):
            for progress in (0.0, 1.0):
                value = schedule(progress)
                # A schedule may end where a range ends that has no end: a clip range that shrinks to 0.
                if not _is_number(value) or value not in one._replace(above=False, below=False):
                    return f"at progress {progress:g} it is {shown(value)}, and it is {_plain_words(kind)}"
    return None


def wanted(value: Any, kinds: list[Any], refers: Refers) -> str:
    """What fits these kinds, in words, where `value` does not."""
    sequence = next((kind for kind in kinds if typing.get_origin(bare(kind)) in SEQUENCES), None)
    if sequence is None:
        return f"it is {_alternatives(kinds)}"
    parts = elements(sequence)
    if any(_fits(value, part, refers) for part in parts):
        return f"it is a list: write [{value!r}]"
    if is_fixed(sequence):
        return f"it is a list of {len(typing.get_args(sequence))}, each entry {_alternatives(parts)}"
    words = _alternatives([part for part in parts if _plain_words(part)])
    return "it is a list" + (f", each entry {words}" if words else "")


def members(annotation: Any) -> list[Any]:
    """The kinds of a union; the annotation itself, where it is none."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [one for member in typing.get_args(annotation) for one in members(member)]
    return [annotation]


def elements(sequence: Any) -> list[Any]:
    """The kinds of a sequence's entries."""
    parts = [kind for one in typing.get_args(bare(sequence)) if one is not Ellipsis for kind in members(one)]
    return list(dict.fromkeys(parts))


def values_of(mapping: Any) -> list[Any]:
    """The kinds of a dict's values."""
    return members(typing.get_args(mapping)[1]) if typing.get_args(mapping) else [Any]


def is_fixed(sequence: Any) -> bool:
    """Whether it is a tuple of a given length."""
    arguments = typing.get_args(sequence)
    return typing.get_origin(sequence) is tuple and bool(arguments) and Ellipsis not in arguments


def bare(kind: Any) -> Any:
    """The kind without its range."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def ranges_of(kind: Any) -> list[Range]:
    return [one for one in typing.get_args(kind)[1:] if isinstance(one, Range)] if bare(kind) is not kind else []


def is_ours(kind: Any) -> bool:
    return inspect.isclass(kind) and kind.__module__.startswith("alfish.")


def is_protocol_of_functions(kind: Any) -> bool:
    return any("__call__" in vars(base) for base in kind.__mro__)


def shown(value: Any) -> str:
    """`repr`, in one line of bearable length."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


def _fits(value: Any, kind: Any, refers: Refers) -> bool:
    ranges, kind = ranges_of(kind), bare(kind)
    origin = typing.get_origin(kind)
    if kind is Any or isinstance(kind, TypeVar):
        return True
    if kind is NoneType or value is None:
        return value is None and kind is NoneType
    if (known := refers(value, kind)) is not None:
        return known
    if kind is bool:
        return _is_number(value) and value in (0, 1)
    if kind in (int, float):
        return _is_number(value) and _is_in(value, ranges or [Range()], kind)
    if kind in (str, Path):
        return isinstance(value, (str, os.PathLike) if kind is Path else str)
    if origin is Literal:
        return isinstance(value, (str, int)) and value in typing.get_args(kind)
    if origin in SEQUENCES:
        return _fits_sequence(value, kind, refers)
    if origin is collections.abc.Mapping:
        return _fits_mapping(value, kind, refers)
    if origin is collections.abc.Callable:
        return callable(value)
    if is_ours(kind):
        if isinstance(value, (*PLAIN, type)):
            return kind in inspect.getmro(type(value)) or (is_protocol_of_functions(kind) and inspect.isclass(value))
        return True
    return True


def _fits_sequence(value: Any, kind: Any, refers: Refers) -> bool:
    parts = elements(kind)
    if isinstance(value, str):
        return str in map(bare, parts)
    if not isinstance(value, (list, tuple)):
        is_sequence = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
        return is_sequence and not isinstance(value, PLAIN) and not inspect.isclass(value)
    if is_fixed(kind) and len(value) != len(typing.get_args(kind)):
        return False
    return all(any(_fits(one, part, refers) for part in parts or [Any]) for one in value)


def _fits_mapping(value: Any, kind: Any, refers: Refers) -> bool:
    if not isinstance(value, Mapping):
        return not isinstance(value, PLAIN) and not inspect.isclass(value)
    return all(any(_fits(one, part, refers) for part in values_of(kind)) for one in value.values())


def _is_number(value: Any) -> bool:
    """Whether it is a real number, of numpy and torch too."""
    if isinstance(value, numbers.Number):
        return isinstance(value, numbers.Real)
    return hasattr(value, "__float__") and math.prod(getattr(value, "shape", ())) == 1


def _is_in(value: Any, ranges: Iterable[Range], kind: type) -> bool:
    try:
        return all(value in one for one in ranges) and (kind is float or float(value).is_integer())
    except OverflowError:  # an int too large for a float
        return False


def _whole(value: Any, kinds: list[Any]) -> Any:
    """An int for a float where an int is declared, and a bool for 0 or 1 where a bool is."""
    kinds = list(map(bare, kinds))
    if bool in kinds and _is_number(value):
        return bool(value)
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        return int(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        parts = [part for kind in kinds if typing.get_origin(kind) in SEQUENCES for part in elements(kind)]
        return type(value)(_whole(one, parts) for one in value) if parts else value
    return value


def _alternatives(kinds: Iterable[Any]) -> str:
    return " or ".join(dict.fromkeys(_plain_words(kind) or "an object, made by @...()" for kind in kinds))


def _plain_words(kind: Any) -> str | None:
    inner = bare(kind)
    if inner is not kind:
        noun = "whole number" if inner is int else "number"
        return " and ".join(one.words(noun) for one in ranges_of(kind))
    if typing.get_origin(kind) is Literal:
        values = [repr(one) for one in typing.get_args(kind)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if typing.get_origin(kind) is collections.abc.Mapping and any(map(ranges_of, values := values_of(kind))):
        return f"a dict, each value {_alternatives(values)}"
    return WORDS.get(typing.get_origin(kind) or kind)
