"""Access to internal names of gin-config, which new versions may change. Other modules of alfish do not use internal
names.

Each function looks up names when it is called. If a name is missing, `import alfish` and Trainers built in Python still
work; only reading a configuration raises `GinChanged`.
"""

import builtins
import contextlib
import functools
import importlib
import inspect
import itertools
import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gin

from alfish.errors import RunError, UsageError

Key = tuple[str, str]  # a scope ('a/b', or ''), and a selector
_YIELDING: set[str] = set()  # see `yield_short_name`


class GinChanged(RunError):
    """Raised if the installed gin-config lacks a name that alfish uses."""


def _name_of(name: str, module: str = "gin.config") -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError) as error:
        raise GinChanged(
            f"the installed gin-config has no {module}.{name}, with which alfish reads configurations; install "
            "gin-config 0.5.0, or build the Trainer in Python"
        ) from error


def keep_sentences() -> None:
    """Prevents gin from appending its chain of calls to the messages of alfish's errors.

    If this version of gin lacks the function that appends, messages keep gin's lines.
    """
    try:
        append = _name_of("augment_exception_message_and_reraise", "gin.utils")
    except GinChanged:
        return

    def append_to_others(exception: Exception, message: str) -> None:
        if isinstance(exception, (UsageError, RunError)):
            raise exception
        append(exception, message)

    importlib.import_module("gin.utils").augment_exception_message_and_reraise = append_to_others  # type: ignore[attr-defined]


def allow_redefinitions() -> None:
    """Lets gin accept a class that is defined again, in a notebook, where a cell may be executed several times."""
    if hasattr(builtins, "__IPYTHON__"):
        gin.enter_interactive_mode()


@contextlib.contextmanager
def redefining() -> Iterator[None]:
    """Within the context, a configurable may replace another one of the same name."""
    was_allowed = _name_of("_INTERACTIVE_MODE")
    gin.enter_interactive_mode()
    try:
        yield
    finally:
        if not was_allowed:
            gin.exit_interactive_mode()


def config_text() -> str:
    """Returns the configuration in gin's normal form, except that dicts are not sorted.

    The order of a dict's entries may be meaningful, for example for the entries of a reward.
    """
    if not gin.config_str():
        return ""
    with _unsorted_dicts():
        return gin.config_str()


def operative_config_text() -> str:
    """Returns the configuration with all defaults in force, formatted as in `config_text`."""
    with _unsorted_dicts():
        return gin.operative_config_str()


@contextlib.contextmanager
def _unsorted_dicts() -> Iterator[None]:
    config, printer = importlib.import_module("gin.config"), _name_of("pprint")
    config.pprint = types.SimpleNamespace(  # type: ignore[attr-defined]
        pformat=functools.partial(printer.pformat, sort_dicts=False)
    )
    try:
        yield
    finally:
        config.pprint = printer  # type: ignore[attr-defined]


def bindings() -> dict[Key, dict[str, Any]]:
    """Returns the value of each bound parameter, by the key of its configurable. Do not change the mapping."""
    return _name_of("_CONFIG")


def parsed_name(name: str) -> tuple[str, str, str]:
    """Returns scope, complete selector and parameter of a name such as 'a/PPO.gamma'.

    Raises:
      ValueError: there is no such parameter.
    """
    parsed = _name_of("ParsedBindingKey").parse(name)
    return parsed.scope, parsed.complete_selector, parsed.arg_name


@contextlib.contextmanager
def rebound(values: Mapping[tuple[str, str, str], Any]) -> Iterator[Callable[[str, str, str], bool]]:
    """Binds parameters within the context; on exit, restores all bindings and gin's record of read parameters.

    Args:
      values: values by scope, selector and parameter.

    Yields:
      Function that takes a scope, a selector and a parameter, and returns whether gin supplied the parameter to a call
      in the scope.
    """
    config, operative = _name_of("_CONFIG"), _name_of("_OPERATIVE_CONFIG")
    before = [(part, {key: dict(own) for key, own in part.items()}) for part in (config, operative)]
    operative.clear()
    for (scope, selector, parameter), value in values.items():
        config.setdefault((scope, selector), {})[parameter] = value

    def is_read(scope: str, selector: str, parameter: str) -> bool:
        return any(
            one == selector and parameter in own and f"{there}/".startswith(f"{scope}/")
            for (there, one), own in operative.items()
        )

    try:
        yield is_read
    finally:
        for part, own in before:
            part.clear()
            part.update(own)


def called() -> list[Key]:
    """Returns the keys of the configurables that were called since the configuration was cleared."""
    return [(scope, selector) for scope, selector in _name_of("_OPERATIVE_CONFIG")]


@contextlib.contextmanager
def without_inherited_defaults() -> Iterator[None]:
    """Within the context, the operative config of a class that inherits its `__init__` lists only bound parameters.

    Otherwise gin would also list the defaults of the signature, even where bindings of the base class apply.
    """
    config = _name_of("_OPERATIVE_CONFIG")
    whole = {key: dict(values) for key, values in config.items()}
    for (scope, selector), values in config.items():
        if not _inherits_init(configurable(selector)):
            continue
        scopes = {"", *itertools.accumulate(scope.split("/"), "{}/{}".format)}
        is_bound = {name for part in scopes for name in bindings().get((part, selector), ())}
        for name in values.keys() - is_bound:
            del values[name]
    try:
        yield
    finally:
        for key, values in whole.items():
            config[key].update(values)


def _inherits_init(part: Any) -> bool:
    """Returns True for a class that inherits its `__init__` from a registered base class."""
    if not inspect.isclass(part):
        return False
    owner = inspect.unwrap(part.__init__).__qualname__.rpartition(".")[0]
    return any(base.__qualname__ == owner and selector_of(base) is not None for base in part.__mro__[1:])


def configurables() -> dict[str, Any]:
    """Returns the class or function behind each registered selector."""
    return {selector: one.wrapped for selector, one in _name_of("_REGISTRY").items()}


def configurable(selector: str) -> Any:
    """Returns the class or function behind a complete selector."""
    return _name_of("_REGISTRY")[selector].wrapped


def unbindable(selector: str) -> set[str]:
    """Returns the `denylist` of a complete selector: parameters that cannot be bound."""
    return set(_name_of("_REGISTRY")[selector].denylist or ())


def is_registered_dynamically(selector: str) -> bool:
    """Returns True if a configuration, not a module, registered the selector."""
    return _name_of("_REGISTRY")[selector].import_source is not None


def selector_of(part: Any) -> str | None:
    """Returns the selector of a class or function, or None if it is not registered."""
    found = _name_of("_inverse_lookup")(part)
    return found.selector if found else None


def is_reference(value: Any) -> bool:
    """Returns True if a value of a binding refers to a configurable: `@X`, `@X()`, or a macro."""
    return isinstance(value, _name_of("ConfigurableReference"))


def is_writable(value: Any) -> bool:
    """Returns True if gin can write a value in a form that it can read again; gin leaves other values out."""
    return _name_of("_is_literally_representable")(value)


def called_with() -> dict[Key, set[str]]:
    """Returns, for each called configurable, the parameters that gin supplied in at least one call."""
    return {key: set(values) for key, values in _name_of("_OPERATIVE_CONFIG").items()}


def reference_to(selector: str) -> Any:
    """Returns gin's object for the reference `@selector`."""
    return _name_of("ConfigurableReference")(selector, False)


def referred() -> list[Key]:
    """Returns the keys of the references in the values of all bindings."""
    return [reference.config_key for reference in _name_of("iterate_references")(bindings())]


@functools.lru_cache(maxsize=16)  # opening a run reads its configuration several times
def statements(text: str) -> tuple[Any, ...]:
    """Returns the statements of a configuration; references and macros in them are plain text.

    Raises:
      SyntaxError, tokenize.TokenError: the text is not gin.
    """

    unresolved = type(
        "Unresolved",
        (_name_of("ParserDelegate", "gin.config_parser"),),
        {"configurable_reference": lambda self, name, evaluate: name, "macro": lambda self, name: name},
    )
    return tuple(_name_of("ConfigParser", "gin.config_parser")(text, unresolved()))


def is_include(statement: Any) -> bool:
    return isinstance(statement, _name_of("IncludeStatement", "gin.config_parser"))


def is_import(statement: Any) -> bool:
    return isinstance(statement, _name_of("ImportStatement", "gin.config_parser"))


@contextlib.contextmanager
def parsing(
    find_include: Callable[[str], Any],
    note: Callable[[Key, str, Any], None],
    instead: Callable[[str], str | None] = lambda name: None,
) -> Iterator[None]:
    """Within the context, reports included files and the bindings that gin parses.

    Args:
      find_include: context manager that is called with the name of an included file, and yields its path; the file is
        parsed within the context.
      note: function called with (key, parameter, value) of each binding.
      instead: function from the name of an unknown reference to its replacement; if it returns None, the reference is
        an error.
    """
    config = importlib.import_module("gin.config")
    parse_file, bind, key_of = (_name_of(name) for name in ("parse_config_file", "bind_parameter", "ParsedBindingKey"))

    def parse_included(file: str, *arguments: Any) -> Any:
        with find_include(file) as path:
            return parse_file(str(path), *arguments)

    def bind_and_note(key: Any, value: Any) -> None:
        bind(key, value)
        parsed = key_of.parse(key)
        note(parsed.config_key, parsed.arg_name, value)

    registry, delegate = _name_of("_REGISTRY"), _name_of("ParserDelegate")

    def refer(self: Any, name: str, evaluate: bool) -> Any:
        bare = name.rpartition("/")[2]
        known = None if registry.matching_selectors(bare) else instead(bare)
        return delegate.configurable_reference(self, known or name, evaluate)

    own = type("Delegate", (delegate,), {"configurable_reference": refer})
    readers = _name_of("_FILE_READERS")
    names = "parse_config_file", "bind_parameter", "ParserDelegate", "_FILE_READERS"
    in_utf8 = [(functools.partial(open, encoding="utf-8-sig"), os.path.isfile)]  # read independently of the locale
    for name, value in zip(names, (parse_included, bind_and_note, own, in_utf8)):
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, (parse_file, bind, delegate, readers)):
            setattr(config, name, value)


@contextlib.contextmanager
def preferring(package: str) -> Iterator[None]:
    """Within the context, an ambiguous name means the configurable of `package`."""
    registry = _name_of("_REGISTRY")
    get_match = registry.get_match

    def get_preferred(name: str, default: Any = None) -> Any:
        own = [selector for selector in registry.matching_selectors(name) if selector.startswith(f"{package}.")]
        return get_match(own[0] if len(own) == 1 else name, default)

    registry.get_match = get_preferred
    try:
        yield
    finally:
        del registry.get_match


def yield_short_name(selector: str) -> None:
    """If a short name matches the given configurable and others, lets it mean the others."""
    registry = _name_of("_REGISTRY")
    if not _YIELDING:
        matching = registry.matching_selectors

        def first_choices(name: str) -> list[str]:
            found: list[str] = matching(name)
            return [one for one in found if one not in _YIELDING] or found

        registry.matching_selectors = first_choices
    _YIELDING.add(selector)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restores the configuration and its lock on exit, including values that cannot be written as text."""
    kept = [_name_of(name) for name in ("_CONFIG", "_OPERATIVE_CONFIG", "_SINGLETONS", "_IMPORTS")]
    before, was_locked = [part.copy() for part in kept], gin.config_is_locked()
    try:
        yield
    finally:
        gin.clear_config()
        for part, content in zip(kept, before):
            part.update(content)
        _name_of("_set_config_is_locked")(was_locked)
