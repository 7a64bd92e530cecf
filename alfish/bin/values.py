"""Whether bound values are of the kind that a parameter takes, as its annotation says. In doubt they are."""

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import gin

PLAIN = (int, float, str, bool, NoneType, Path)
SEQUENCES = (collections.abc.Sequence, list, tuple)
WORDS = {
    int: "a number",
    float: "a number",
    bool: "True or False",
    str: "text in quotes",
    Path: "text in quotes",
    collections.abc.Callable: "a reference (@...)",
    collections.abc.Mapping: "a dict",
    NoneType: "None",
}


@functools.cache
def hints(selector: str) -> dict[str, Any]:
    """The annotations of a configurable's parameters; none, where they cannot be read."""
    wrapped = gin.config._REGISTRY[selector].wrapped
    try:
        return typing.get_type_hints(wrapped.__init__ if inspect.isclass(wrapped) else wrapped)
    except (NameError, TypeError, AttributeError):
        return {}


def takes_parts(selector: str, parameter: str | None = None) -> bool:
    """Whether a parameter, or any of them, takes classes, functions or objects, and so is what builds others."""
    annotations = hints(selector)
    if parameter is not None:
        return not _is_plain(annotations.get(parameter, Any))
    return any("Callable" in str(annotation) for annotation in annotations.values())


def mistake(selector: str, parameter: str, value: Any) -> str | None:
    """What a parameter of alfish takes, where it does not take this value; None, where it does.

    Args:
      selector, parameter: of gin.
      value: bound, with macros replaced by what they stand for.
    """
    if not selector.startswith("alfish."):
        return None  # annotations of others may be looser than what they take
    kinds = _members(hints(selector).get(parameter, Any))
    return None if any(_fits(value, kind) for kind in kinds) else _wanted(value, kinds)


def _fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if value is None or kind is Any:
        return True
    if isinstance(value, gin.config.ConfigurableReference):
        return _refers(value, kind)
    if kind in (int, float, bool):
        return isinstance(value, (int, float))
    if kind in (str, Path):
        return isinstance(value, str)
    if origin in SEQUENCES:
        elements = _elements(kind)
        if isinstance(value, (list, tuple)):
            return all(any(_fits(one, element) for element in elements) for one in value)
        return isinstance(value, str) and str in elements
    if origin is collections.abc.Mapping:
        return isinstance(value, dict)
    return not (origin is collections.abc.Callable or kind is NoneType or _is_ours(kind))


def _refers(value: Any, kind: Any) -> bool:
    """Whether `@X`, or `@X()`, is of this kind."""
    origin, target = typing.get_origin(kind), value.configurable.wrapped
    if not value.evaluate:
        if _is_ours(kind):
            return any("__call__" in vars(base) for base in kind.__mro__)  # a protocol that a function has too
        return not (kind in PLAIN or origin in SEQUENCES)
    if not inspect.isclass(target):
        return True  # whatever the function returns
    if origin is collections.abc.Callable:
        made = typing.get_args(kind)[-1]
        return not (inspect.isclass(made) and issubclass(target, made)) and not _lacks_arguments(value)
    if origin in SEQUENCES:
        return hasattr(target, "__iter__") or hasattr(target, "__getitem__")
    return kind not in PLAIN or issubclass(target, kind)


def _lacks_arguments(reference: Any) -> bool:
    """Whether `@X()` cannot be made, since X takes arguments that only who builds it has."""
    selector = reference.configurable.selector
    bound = {name for (_, at), found in gin.config._CONFIG.items() if at == selector for name in found}
    signature = inspect.signature(reference.configurable.wrapped)
    needed = [
        name
        for name, one in signature.parameters.items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return not bound.issuperset(needed)


def _wanted(value: Any, kinds: list[Any]) -> str:
    sequence = next((kind for kind in kinds if typing.get_origin(kind) in SEQUENCES), None)
    parts = _elements(sequence) if sequence else kinds
    takes_classes = any(typing.get_origin(part) is collections.abc.Callable for part in parts)
    names = list(_names(value, takes_classes))
    if names and (takes_classes or any(map(_is_ours, parts))):
        noun = "classes or functions" if takes_classes else "objects"
        written = ", ".join(f"@{name}" + "()" * (not takes_classes) for name in names)
        if sequence:
            return f"it takes {noun}: write [{written}]"
        return f"it takes {'a class or function' if takes_classes else 'an object'}: write {written}"
    if sequence and any(_fits(value, part) for part in parts):
        return f"it is a list: write [{value!r}]"
    if sequence:
        words = [WORDS[part] for part in parts if part in WORDS]
        return "it is a list" + (f", each entry {' or '.join(dict.fromkeys(words))}" if words else "")
    words = [WORDS.get(typing.get_origin(kind) or kind, "an object, made by @...()") for kind in kinds]
    return f"it is {' or '.join(dict.fromkeys(words))}"


def _names(value: Any, takes_classes: bool) -> Iterator[str]:
    """Of what a value refers to, or means to refer to, in a text without @."""
    if isinstance(value, gin.config.ConfigurableReference):
        yield value.scoped_selector
    elif isinstance(value, str) and takes_classes:
        known = {selector.rpartition(".")[2] for selector, _ in gin.config._REGISTRY.items()}
        yield from {value} & known
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _names(inner, takes_classes)


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return list(typing.get_args(annotation))
    return [annotation]


def _elements(sequence: Any) -> list[Any]:
    return [kind for one in typing.get_args(sequence) if one is not Ellipsis for kind in _members(one)]


def _is_ours(kind: Any) -> bool:
    return inspect.isclass(kind) and kind.__module__.startswith("alfish.")


def _is_plain(annotation: Any) -> bool:
    inner = [one for one in typing.get_args(annotation) if one is not Ellipsis]
    if typing.get_origin(annotation) is collections.abc.Callable:
        return False
    return all(map(_is_plain, inner)) if inner else annotation in PLAIN
