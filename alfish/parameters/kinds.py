"""Kinds of values that annotations declare, and sentences about values of the wrong kind."""

import collections.abc
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from alfish.errors import UsageError, is_command

if TYPE_CHECKING:
    import torch


class Range(NamedTuple):
    """Range of numbers from `low` to `high`.

    Attributes:
      low, high: bounds, included unless `above` or `below` is True. Infinity is never included.
      above: whether `low` is excluded.
      below: whether `high` is excluded.
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
        """Returns a description of the range; `noun` is 'number' or 'integer'."""
        article = "an" if noun == "integer" else "a"
        if math.isinf(self.low) and math.isinf(self.high):
            return "an integer" if noun == "integer" else f"a finite {noun}"
        if math.isinf(self.high):
            return f"a positive {noun}" if self == POSITIVE else f"{article} {noun} {self._least()}"
        if math.isinf(self.low):
            return f"{article} {noun} {'below' if self.below else 'of at most'} {self.high}"
        return f"{article} {noun} in {'[('[self.above]}{self.low}, {self.high}{'])'[self.below]}"

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
LayerSize = Annotated[int, Range(1, 10**6)]  # number of a layer's features; a larger layer would not fit into memory
NonNegativeInt = Annotated[int, Range(0)]


PLAIN = (numbers.Number, str, bytes, bool, NoneType, os.PathLike, list, tuple, dict, set)
SEQUENCES = (collections.abc.Sequence, list, tuple)
WORDS = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "text in quotes",
    Path: "text in quotes",
    collections.abc.Callable: "a reference (@...)",
    collections.abc.Mapping: "a dict",
    NoneType: "None",
}
OBJECT = "an object, made by @...()"
SCHEDULE = "a schedule such as @Linear()"
# Words that a message about a Python call has in place of words about gin.
IN_PYTHON = {
    WORDS[collections.abc.Callable]: "a class or function",
    WORDS[str]: "a text",
    OBJECT: "an object",
    SCHEDULE: "a schedule such as Linear(3e-4, 0.0)",
}
# Function of a value and a kind. Returns whether the value is a reference to an object of this kind; None if the value
# is not a reference.
# `configuration.wrong_kinds` has such a function for gin's references.
Refers = Callable[[Any, Any], "bool | None"]


def mistake(value: Any, annotation: Any, refers: Refers = lambda value, kind: None) -> str | None:
    """Returns a sentence about the values that a parameter takes; None if it takes, or may take, `value`."""
    kinds = members(annotation)
    if takes_schedule(kinds) and inspect.isclass(value):
        return f"it requires an object: write {value.__name__}(...)"
    if not any(_fits(value, kind, refers) for kind in kinds):
        words = wanted(value, kinds, refers)
        for in_gin, in_python in () if is_command() else IN_PYTHON.items():
            words = words.replace(in_gin, in_python)
        return words
    if refers(value, Any) is None and callable(value) and not inspect.isclass(value):
        return _schedule_mistake(value, kinds)
    return None


def takes_schedule(kinds: list[Any]) -> bool:
    """Returns True if a parameter of the given kinds takes a number or a function of progress."""
    has_number = any(ranges_of(kind) or bare(kind) in (int, float) for kind in kinds)
    return has_number and any(typing.get_origin(bare(kind)) is collections.abc.Callable for kind in kinds)


def _schedule_mistake(schedule: Callable[..., Any], kinds: list[Any]) -> str | None:
    """Returns a sentence if a schedule is outside the parameter's range at one of 11 values of progress; else None."""
    for kind in kinds:
        for one in ranges_of(kind):
            for progress in (0.0, 1.0, *(tenths / 10 for tenths in range(1, 10))):
                try:
                    value = schedule(progress)
                except TypeError:
                    return f"it must be {_plain_words(kind)}, or a function of progress (a number from 0 to 1)"
                # A schedule may reach an excluded bound: a clip range may shrink to 0.
                if not is_number(value) or value not in one._replace(above=False, below=False):
                    return f"at progress {progress:g} it is {shown(value)}, but it must be {_plain_words(kind)}"
    return None


def wanted(value: Any, kinds: list[Any], refers: Refers) -> str:
    """Returns a sentence about the values that fit the given kinds; `value` does not fit."""
    sequence = next((kind for kind in kinds if typing.get_origin(bare(kind)) in SEQUENCES), None)
    single = [kind for kind in kinds if kind is not sequence and bare(kind) is not NoneType]
    if sequence is None or (single and not isinstance(value, (list, tuple))):
        return f"it must be {_alternatives([kind for kind in kinds if kind is not sequence])}"
    made = [each for each in value if inspect.isclass(each)] if isinstance(value, (list, tuple)) else []
    if made:
        return f"it must be a list of objects, not of classes: write {made[0].__name__}()"
    parts = elements(sequence)
    if any(_fits(value, part, refers) for part in parts):
        return f"it must be a list: write [{value!r}]"
    words = _list_words(sequence)
    return f"it must be {words}" + " of objects" * (words == "a list" and isinstance(value, (list, tuple)))


def words_of(annotation: Any) -> str:
    """Returns a description of the values that an annotation allows, such as 'a number in [0, 1] or None'."""
    each = [
        "anything"
        if bare(kind) is Any or isinstance(kind, TypeVar)
        else _list_words(kind)
        if typing.get_origin(bare(kind)) in SEQUENCES
        else _alternatives([kind])
        for kind in members(annotation)
    ]
    return " or ".join(dict.fromkeys(each))


def members(annotation: Any) -> list[Any]:
    """Returns the kinds of a union, or the annotation itself if it is not a union."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [one for member in typing.get_args(annotation) for one in members(member)]
    return [annotation]


def elements(sequence: Any) -> list[Any]:
    """Returns the kinds of a sequence's entries."""
    parts = [kind for one in typing.get_args(bare(sequence)) if one is not Ellipsis for kind in members(one)]
    return list(dict.fromkeys(parts))


def values_of(mapping: Any) -> list[Any]:
    """Returns the kinds of a dict's values."""
    return members(typing.get_args(mapping)[1]) if typing.get_args(mapping) else [Any]


def is_fixed(sequence: Any) -> bool:
    """Returns True for a tuple of fixed length."""
    arguments = typing.get_args(sequence)
    return typing.get_origin(sequence) is tuple and bool(arguments) and Ellipsis not in arguments


def bare(kind: Any) -> Any:
    """Returns a kind without its range."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def ranges_of(kind: Any) -> list[Range]:
    return [one for one in typing.get_args(kind)[1:] if isinstance(one, Range)] if bare(kind) is not kind else []


def is_ours(kind: Any) -> bool:
    return inspect.isclass(kind) and kind.__module__.startswith("alfish.")


def is_protocol_of_functions(kind: Any) -> bool:
    return any("__call__" in vars(base) for base in kind.__mro__)


def shown(value: Any) -> str:
    """Returns `repr(value)` in one line of at most 200 characters."""
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
        return is_number(value) and value in (0, 1)
    if kind in (int, float):
        return is_number(value) and not isinstance(value, bool) and _is_in(value, ranges or [Range()], kind)
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
    if hasattr(value, "tolist"):  # an array or a tensor; a 0-d array becomes a number
        return isinstance(entries := value.tolist(), list) and _fits_sequence(entries, kind, refers)
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


def is_number(value: Any) -> bool:
    """Returns True for a real number, also in a 0-d array or tensor."""
    if isinstance(value, numbers.Number):
        return isinstance(value, numbers.Real)
    return hasattr(value, "__float__") and not getattr(value, "shape", ())


def _is_in(value: Any, ranges: Iterable[Range], kind: type) -> bool:
    try:
        return all(value in one for one in ranges) and (kind is float or float(value).is_integer())
    except OverflowError:  # an int that is too large for a float
        return False


def _list_words(sequence: Any) -> str:
    parts = elements(sequence)
    if is_fixed(sequence):
        return f"a list of {len(typing.get_args(sequence))}, each entry {_alternatives(parts)}"
    words = _alternatives([part for part in parts if _plain_words(part)])
    return "a list" + (f", each entry {words}" if words else "")


def _alternatives(kinds: Iterable[Any]) -> str:
    kinds = list(kinds)
    words = [_plain_words(kind) or OBJECT for kind in kinds]
    if takes_schedule(kinds):  # a function or an object
        words = [SCHEDULE if one in (OBJECT, WORDS[collections.abc.Callable]) else one for one in words]
    return " or ".join(dict.fromkeys(words))


def _plain_words(kind: Any) -> str | None:
    inner = bare(kind)
    if inner is not kind:
        noun = "integer" if inner is int else "number"
        return " and ".join(one.words(noun) for one in ranges_of(kind))
    if typing.get_origin(kind) is Literal:
        values = [repr(one) for one in typing.get_args(kind)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if typing.get_origin(kind) is collections.abc.Mapping and any(map(ranges_of, values := values_of(kind))):
        return f"a dict, each value {_alternatives(values)}"
    return WORDS.get(typing.get_origin(kind) or kind)


def device_named(name: str, parameter: str = "Trainer.device") -> "torch.device":
    """Returns a device; 'auto' means a GPU if available.

    Args:
      name: name of the device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
      parameter: name of the parameter, for messages.

    Raises:
      UsageError: the device does not exist.
    """
    import torch  # imported here, because other functions of this module must work without torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{parameter} is {name!r}; it must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"{parameter} is {name!r}, which alfish does not use; it must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{parameter} is {name!r}, but torch finds no GPU here; set it to 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(f"{parameter} is {name!r}, but torch finds {count} GPUs here; the last is cuda:{count - 1}")
    return device
