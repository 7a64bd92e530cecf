"""Catalogue of all parameters that gin can bind, each with its default, kind and help."""

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import gin

import alfish
from alfish.parameters import checking, differences, gin_internals
from alfish.parameters.kinds import bare, elements, members, words_of

HIDDEN = ("alfish.absent", "alfish.undescribed")  # placeholders for parts that cannot be imported or named
ARGUMENT = re.compile(r"^  (\w[\w, *]*): (.*(?:\n(?:    .*|$))*)", re.MULTILINE)


class Setting(NamedTuple):
    """A parameter that gin can bind.

    Attributes:
      name: `Class.parameter`.
      default: text of the default; None means that a value must be bound.
      kind: description of the values that the parameter takes.
      help: first sentence of the documentation of the parameter, or else of its class or function.
    """

    name: str
    default: str | None
    kind: str
    help: str


def entries() -> list[Setting]:
    """Returns the parameters of all registered parts, of alfish and of other packages, sorted by class."""
    for module in pkgutil.walk_packages(alfish.__path__, "alfish."):
        if not module.name.startswith(("alfish.bin", "alfish.__main__")):
            importlib.import_module(module.name)
    parts = gin_internals.configurables().items()
    own = {selector: part for selector, part in parts if not selector.startswith("gin.") and selector not in HIDDEN}
    names = sorted(own, key=lambda selector: selector.rpartition(".")[2].lower())
    return [entry for selector in names for entry in _of(selector, own[selector])]


def in_force(operative: str) -> Iterator[tuple[str, Setting | None]]:
    """Yields each binding of an operative configuration as `name = value`, with its `Setting`; None for macros."""
    known = {entry.name: entry for entry in entries()}
    for name, value in differences.values(operative).items():
        yield f"{name} = {value}", known.get(name.rpartition("/")[2])


def _of(selector: str, part: Any) -> Iterator[Setting]:
    """Yields the parameters of a class or function, including parameters that a class passes to its base class."""
    name = selector.rpartition(".")[2]
    seen = gin_internals.unbindable(selector)
    about = (inspect.getdoc(part) or "").partition("\n")[0].rstrip(".")
    for function, text in _signatures(part):
        helps = _helps(text)
        annotations = checking.hints(function)
        for parameter in inspect.signature(function).parameters.values():
            is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            is_required = parameter.default in (parameter.empty, gin.REQUIRED)
            annotation = annotations.get(parameter.name, Any)
            is_passed = parameter.default is parameter.empty and not _has_float(annotation)
            if is_variable or is_passed or parameter.name in seen:
                continue
            seen.add(parameter.name)
            default = None if is_required else _shown(parameter.default)
            yield Setting(f"{name}.{parameter.name}", default, words_of(annotation), helps.get(parameter.name, about))


def _has_float(annotation: Any) -> bool:
    """Returns True for the annotations of floats and lists of floats.

    Floats and lists of floats without a default must be bound, such as `Linear.start`. Other parameters without a
    default (specs, parts, integer sizes) are passed by the code that builds the part.
    """
    kinds = members(annotation)
    return float in [bare(inner) for kind in kinds for inner in (kind, *elements(kind))]


def _signatures(part: Any) -> Iterator[tuple[Any, str]]:
    """Yields the functions whose parameters gin can bind for a part, each with its documentation."""
    if not inspect.isclass(part):
        yield part, inspect.getdoc(part) or ""
        return
    for kind in part.__mro__:
        if kind is not object and "__init__" in vars(kind):
            yield vars(kind)["__init__"], inspect.cleandoc(kind.__doc__ or "")
            kinds = {one.kind for one in inspect.signature(vars(kind)["__init__"]).parameters.values()}
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                return


def _helps(text: str) -> dict[str, str]:
    """Returns the first sentence about each argument in a docstring, by argument."""
    arguments = re.search(r"^Args:\n((?:  .*\n?|\n)*)", text, re.MULTILINE)
    found: dict[str, str] = {}
    for names, words in ARGUMENT.findall(arguments[1]) if arguments else ():
        sentence = re.split(r"(?<=[^.]{2}\.) ", " ".join(words.split()))[0].rstrip(".")
        found |= {name.strip("* "): sentence for name in names.split(",")}
    return found


def _shown(default: Any) -> str:
    """Returns a default in the form of a gin file, with references for classes, functions and partials."""
    if isinstance(default, functools.partial):
        return f"{_shown(default.func)}({', '.join(f'{name}={value!r}' for name, value in default.keywords.items())})"
    if inspect.isclass(default) or inspect.isfunction(default):
        return f"@{default.__name__}"
    if isinstance(default, (list, tuple)) and any(map(callable, default)):
        return f"[{', '.join(map(_shown, default))}]"
    return repr(default)
