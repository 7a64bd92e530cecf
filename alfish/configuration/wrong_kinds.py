"""Checks the kinds and ranges of bound values; accepts values of unknown kind or range.

`alfish.parameters.kinds` defines the values that an annotation takes; this module adds gin's references (`@...`).
"""

import collections.abc
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from alfish import errors
from alfish.configuration.bindings import MACRO, Binding, Reading, macros
from alfish.configuration.sentences import close_names
from alfish.errors import UsageError
from alfish.parameters import checking, gin_internals, kinds
from alfish.parameters.kinds import SEQUENCES, bare, elements, is_ours, members, values_of

PLAIN = (int, float, str, bool, NoneType, Path)


def refuse_wrong_kinds(reading: Reading) -> None:
    """Raises UsageError if a parameter of alfish does not take the value that is bound to it."""
    for one in reading.last():
        words = mistake(one.key[1], one.parameter, _without_macros(one.value, one))
        if words:
            raise UsageError(f"{one.name} is {_written(one.value)}, bound in {one.layer}; {words}")


def _without_macros(value: Any, binding: Binding, within: tuple[str, ...] = ()) -> Any:
    """Returns a value with each macro replaced by its value.

    Raises:
      UsageError: a macro of `binding` is not set, or refers to itself.
    """
    for name in macros(value) if gin_internals.is_reference(value) else ():
        where = f"{binding.name} in {binding.layer}"
        if name in within:
            raise UsageError(f"{where} refers to %{name}, which refers to itself: {' -> '.join((*within, name))}")
        bound = gin_internals.bindings()
        if (name, MACRO) not in bound:
            known = [scope for scope, selector in bound if selector == MACRO]
            raise UsageError(f"{where} refers to %{name}, which nothing sets{close_names(name, known)}")
        return _without_macros(bound[name, MACRO]["value"], binding, (*within, name))
    if isinstance(value, (list, tuple)):
        return type(value)(_without_macros(inner, binding, within) for inner in value)
    if isinstance(value, dict):
        return {key: _without_macros(inner, binding, within) for key, inner in value.items()}
    return value


def takes_parts(selector: str, parameter: str | None = None) -> bool:
    """Returns whether a parameter takes classes or objects; None means any parameter of the configurable."""
    annotations = _hints(selector)
    if parameter is not None:
        return not _is_plain(annotations.get(parameter, Any))
    return any("Callable" in str(annotation) for annotation in annotations.values())


def mistake(selector: str, parameter: str, value: Any) -> str | None:
    """Returns a sentence about the values that a parameter of alfish takes; None if the parameter takes the given
    value.

    Args:
      selector: gin's name of the configurable.
      parameter: name of its parameter.
      value: bound value, with macros replaced by their values.
    """
    if not selector.startswith("alfish."):
        return None  # annotations in other packages may not describe all accepted values
    taken = members(_hints(selector).get(parameter, Any))
    for one, of_one in _with_values(value, taken):
        is_schedule = kinds.takes_schedule(of_one) and gin_internals.is_reference(one)
        if is_schedule and (words := _schedule_mistake(one)):
            return words
    words = kinds.mistake(value, _hints(selector).get(parameter, Any), _refers)
    return words and (_reference_instead(value, taken) or words)


def _with_values(value: Any, taken: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yields a value and, for a dict, its values, each with the allowed kinds."""
    yield value, taken
    if isinstance(value, collections.abc.Mapping):
        of_values = [
            kind for one in taken if typing.get_origin(one) is collections.abc.Mapping for kind in values_of(one)
        ]
        for one in value.values():
            yield one, of_values


def _schedule_mistake(reference: Any) -> str | None:
    """Returns a message if a schedule is written as `@X` instead of `@X()` or lacks a required argument, else None."""
    name = reference.scoped_selector
    if not reference.evaluate:
        return f"it requires an object: write @{name}()" if inspect.isclass(reference.configurable.wrapped) else None
    missing = _missing_arguments(reference)
    return f"{name.rpartition('/')[2]}.{missing[0]} has no value; bind it" if missing else None


def _hints(selector: str) -> dict[str, Any]:
    wrapped = gin_internals.configurable(selector)
    return checking.hints(wrapped.__init__ if inspect.isclass(wrapped) else wrapped)


def _refers(value: Any, kind: Any) -> bool | None:
    """Returns whether `@X` or `@X()` has the given kind; None if the value is not a reference."""
    if not gin_internals.is_reference(value):
        return None
    origin, target = typing.get_origin(kind), value.configurable.wrapped
    if not value.evaluate:
        if is_ours(kind):
            return kinds.is_protocol_of_functions(kind)
        return not (kind in PLAIN or origin in (*SEQUENCES, typing.Literal))
    if not inspect.isclass(target):
        return True  # the kind of a function's result is unknown
    if origin is collections.abc.Callable:
        made = typing.get_args(kind)[-1]
        return not (inspect.isclass(made) and made in inspect.getmro(target)) and not _missing_arguments(value)
    if origin in SEQUENCES:
        return hasattr(target, "__iter__") or hasattr(target, "__getitem__")
    return origin is not typing.Literal and (kind not in PLAIN or issubclass(target, kind))


def _missing_arguments(reference: Any) -> list[str]:
    """Returns the required arguments of `@X()` that are not bound."""
    selector = reference.configurable.selector
    bound = {name for (_, at), found in gin_internals.bindings().items() if at == selector for name in found}
    signature = inspect.signature(reference.configurable.wrapped)
    needed = [
        name
        for name, one in signature.parameters.items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return [name for name in needed if name not in bound]


def _reference_instead(value: Any, taken: list[Any]) -> str | None:
    """Returns a hint if a reference has the wrong form (`@X` or `@X()`) or lacks its @; None otherwise."""
    sequence = next((kind for kind in taken if typing.get_origin(kind) in SEQUENCES), None)
    parts = elements(sequence) if sequence else taken
    takes_classes = any(typing.get_origin(bare(part)) is collections.abc.Callable for part in parts)
    names = list(_names(value, takes_classes))
    if not names or not (takes_classes or any(map(is_ours, parts))):
        return None
    noun = "classes or functions" if takes_classes else "objects"
    sign = "@"
    if not errors.is_command():
        if takes_classes and not any(gin_internals.is_reference(one) for one in (value, *_entries(value))):
            return (
                f"it requires {noun if sequence else 'a class or function'}: give {' and '.join(names)} without quotes"
            )
        sign, names = "", [_in_python(f"@{name}") for name in names]
        if any(" " in name for name in names):  # not a class, but a lambda or an object
            return None
    written = ", ".join(f"{sign}{name}" + "()" * (not takes_classes) for name in names)
    if sequence:
        return f"it requires {noun}: write [{written}]"
    return f"it requires {'a class or function' if takes_classes else 'an object'}: write {written}"


def _written(value: Any) -> str:
    """Returns a bound value as the user wrote it; for a Python call, without gin's scopes and modules."""
    return repr(value) if errors.is_command() else _in_python(repr(value))


def _in_python(text: str) -> str:
    """Returns a gin text in which each reference is the name that a Python program uses."""
    return re.sub(r"@(?:([\w./]+)/)?(?:\w+\.)*(\w+)", _name_in_python, text)


def _name_in_python(reference: re.Match[str]) -> str:
    bound = gin_internals.bindings().get((reference[1], "alfish.undescribed"), {})
    if reference[2] != "undescribed" or "what" not in bound:
        return reference[2]
    _, _, what = bound["what"].partition(" is ")
    return what.rpartition(".")[2] if what.startswith("the local ") else what


def _entries(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else ()


def _names(value: Any, takes_classes: bool) -> Iterator[str]:
    """Yields the names that a value refers to, and names of configurables in texts without @."""
    if gin_internals.is_reference(value):
        yield value.scoped_selector
    elif isinstance(value, str) and takes_classes:
        known = {selector.rpartition(".")[2] for selector in gin_internals.configurables()}
        yield from {value} & known
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _names(inner, takes_classes)


def _is_plain(annotation: Any) -> bool:
    kind = bare(annotation)
    if typing.get_origin(kind) is collections.abc.Callable:
        return False
    if typing.get_origin(kind) is typing.Literal:
        return True
    inner = [one for one in typing.get_args(kind) if one is not Ellipsis]
    return all(map(_is_plain, inner)) if inner else kind in PLAIN
