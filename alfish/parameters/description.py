"""Describes a Trainer that was built in Python as a gin configuration that rebuilds it.

A part is a class or function of a module, a `functools.partial` of one, or an object of a class that checks the
arguments of its constructor, such as `Linear(3e-4, 0.0)`. The arguments apply only to their part, so each part has a
separate scope: `algorithm/alfish.algorithms.PPO.gamma = 0.98`. A part that is not registered in gin is named in a
comment, `# part: my_lab.nets:Net`, and registered before the text is parsed.
"""

import contextlib
import functools
import inspect
import math
import numbers
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gin
import numpy as np

from alfish.errors import UsageError
from alfish.parameters import gin_internals
from alfish.parameters.checking import checked, construction

CONFIG_FILE = "config.gin"  # file in a run's directory with the configuration as the user wrote it
OPERATIVE_FILE = "operative_config.gin"  # file in a run's directory with the configuration and all defaults
PART = re.compile(r"^# part: ([\w.]+):([\w.]+)$", re.MULTILINE)
HEADER = "# Made from a Trainer that was built in Python.\n"

# Module and qualified name of each part that `register` registered, by its name in gin.
_REGISTERED: dict[str, tuple[str, str]] = {}


def as_gin(arguments: Mapping[str, Any]) -> str:
    """Returns the gin configuration that builds a Trainer again.

    A part that cannot be described becomes a reference to `undescribed`, which raises when it is called.

    Args:
      arguments: arguments of the Trainer, by name. Arguments that are currently bound by gin are described by their
        bindings.
    """
    bound = gin.get_bindings("alfish.Trainer", resolve_references=False)
    in_force = gin_internals.config_text()
    writer = GinWriter()
    defaults = inspect.signature(gin.get_configurable("alfish.Trainer")).parameters
    for name, value in arguments.items():
        if name not in bound and value is not defaults[name].default:
            writer.bind("", "alfish.Trainer", name, value, f"Trainer.{name}")
    modules = writer.modules | (_bound_modules() if in_force else set())
    return HEADER + header(in_force) + writer.text(modules) + in_force


def as_bindings(settings: Mapping[str, Any]) -> tuple[list[str], dict[str, Any], list[str]]:
    """Returns settings that were given in Python as gin bindings.

    Args:
      settings: values by the name of the parameter, such as `PPO.gamma`.

    Returns:
      The bindings as text; the values that the text cannot express, by name; and the names of settings that another
      program cannot build, also because they are defined in `__main__`.
    """
    texts, objects, own = [], {}, []
    for name, value in settings.items():
        written = GinWriter()
        scope, _, rest = name.rpartition("/")
        selector, _, parameter = rest.rpartition(".")
        written.bind(scope, selector, parameter, value, name)
        texts.append(written.text().rstrip())
        if not written.is_whole:
            objects[name] = value
        if not written.is_whole or "__main__" in written.modules:
            own.append(name)
    return texts, objects, own


def header(text: str) -> str:
    """Returns the comment lines `# part: ...` for the registered parts that a gin text names."""
    return "".join(
        f"# part: {module}:{name}\n"
        for selector, (module, name) in sorted(_REGISTERED.items())
        if re.search(rf"\b{re.escape(selector.rpartition('.')[2])}\b", text)
    )


def register(module: str, name: str) -> None:
    """Registers a class or function in gin, unless it is registered already.

    Args:
      module: name of a module that is already imported.
      name: qualified name inside the module.

    Raises:
      UsageError: the module defines no such class or function. A name that the module only imports is refused, so that
        another person's configuration cannot reach other modules through this module.
    """
    part: Any = sys.modules[module]
    for attribute in name.split("."):
        part = getattr(part, attribute, None)
    is_part = inspect.isclass(part) or (inspect.isfunction(part) and "." not in name)
    defined_in = sys.modules[module].__name__  # differs from `module` if the module has moved
    if not is_part or (part.__module__, part.__qualname__) != (defined_in, name):
        remedy = "; define it in a separate module, because `__main__` is a different module in each program"
        raise UsageError(f"there is no class or function {name!r} in {module}{remedy * (module == '__main__')}")
    selector = f"{module}.{name}"
    if gin_internals.selector_of(part) is None:
        # If a notebook defines a class again or a module is reloaded, gin would refuse the name, which is taken.
        with gin.unlock_config(), contextlib.ExitStack() as stack:
            if selector in _REGISTERED:
                stack.enter_context(gin_internals.redefining())
            gin.external_configurable(part, name=name, module=module)
        gin_internals.yield_short_name(selector)  # else `Linear` would be ambiguous after a run with `torch.nn.Linear`
        _REGISTERED[selector] = module, name


def registered() -> list[tuple[str, str]]:
    """Returns module and qualified name of each registered part, for a process that reads the same configuration."""
    return list(_REGISTERED.values())


@gin.configurable(module="alfish")
@checked
def undescribed(*args: Any, what: str = gin.REQUIRED, **kwargs: Any) -> Any:
    """Placeholder for a part of a Trainer that a configuration cannot refer to.

    Args:
      what: name of the part, and why a configuration cannot refer to it.

    Raises:
      UsageError: always.
    """
    remedy = "construct the Trainer in Python with this root_dir and call load_policy"
    if what.startswith("make_environment.env_id "):
        remedy = "give `environment` to alfish.evaluate"
    raise UsageError(
        f"{what}, which no configuration can refer to: {remedy}, or train with module-level classes and functions and "
        "plain arguments"
    )


@gin.configurable(module="alfish")
@checked
def absent(*args: Any, reason: str = gin.REQUIRED, **kwargs: Any) -> Any:
    """Placeholder for a part that could not be imported. It raises only if the part is built, which may not happen.

    Args:
      reason: message of the error.

    Raises:
      UsageError: always.
    """
    raise UsageError(reason)


class GinWriter:
    """Collects the bindings of parts as text.

    Attributes:
      modules: modules that the text must import.
      is_whole: True if everything could be described.
    """

    is_whole = True

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._parts: set[tuple[str, str]] = set()
        self._lines: list[str] = []
        self._scopes: set[str] = set()

    def text(self, modules: set[str] | None = None) -> str:
        """Returns parts, imports and bindings, one per line."""
        names = sorted((self.modules if modules is None else modules) - {"__main__"})
        parts = [f"# part: {module}:{name}" for module, name in sorted(self._parts)]
        return "".join(f"{line}\n" for line in [*parts, *(f"import {name}" for name in names), *self._lines])

    def bind(self, scope: str, selector: str, parameter: str, value: Any, name: str) -> None:
        """Adds a binding, and the bindings of the parts in its value.

        Args:
          scope, selector, parameter: parts of the binding's left side; the scope may be ''.
          value: value of the parameter.
          name: name of the value in messages, such as `Trainer.algorithm`.
        """
        prefix = f"{scope}/" if scope else ""
        index = len(self._lines)
        self._lines.insert(index, f"{prefix}{selector}.{parameter} = {self._value(value, name)}")

    def _value(self, value: Any, name: str) -> str:
        if isinstance(value, np.bool_ | np.str_ | np.ndarray):
            value = value.tolist()
        if isinstance(value, numbers.Real) and type(value) is not bool:  # includes numpy's numbers
            value = int(value) if isinstance(value, numbers.Integral) else float(value)
        elif isinstance(value, Path) or str(type(value)) == "<class 'torch.device'>":  # without an import of torch
            value = str(value)
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        if type(value) in (list, tuple):
            inner = [self._value(one, f"{name}[{index}]") for index, one in enumerate(value)]
            return f"[{', '.join(inner)}]" if isinstance(value, list) else f"({''.join(f'{one}, ' for one in inner)})"
        if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
            items = [f"{key!r}: {self._value(one, f'{name}[{key!r}]')}" for key, one in value.items()]
            return "{" + ", ".join(items) + "}"
        return self._part(value, name)

    def _part(self, part: Any, name: str) -> str:
        target, arguments, made = part, {}, construction(part)
        if made is not None:
            target, arguments = type(part), made
        elif isinstance(part, functools.partial):
            target = part.func
            try:
                arguments = inspect.signature(target).bind_partial(*part.args).arguments | part.keywords
            except TypeError:
                return self._undescribed(part, name)
        has_name = inspect.isclass(target) or inspect.isfunction(target)
        try:
            selector = gin_internals.selector_of(target) if has_name else None
        except gin_internals.GinChanged:
            return self._undescribed(part, name)
        found = gin_internals.configurable(selector) if selector else target
        module, qualname = getattr(found, "__module__", None) or "", getattr(found, "__qualname__", "")
        if selector is None:
            if not has_name or not _is_importable(target, module, qualname):
                return self._undescribed(part, name)
            self._parts.add((module, qualname))
        self.modules.add(module)
        selector = selector or f"{module}.{qualname}"
        call = "()" * (made is not None)
        if not arguments:  # a scope of its own would hide the bindings of the scope in which the part is built
            return f"@{selector}{call}"
        scope = self._scope(name)
        for parameter, value in arguments.items():
            self.bind(scope, selector, parameter, value, f"{name}.{parameter}")
        return f"@{scope}/{selector}{call}"

    def _undescribed(self, part: Any, name: str) -> str:
        self.is_whole = False
        function = part.func if isinstance(part, functools.partial) else part
        kind = "a lambda" if "<lambda>" in getattr(function, "__qualname__", "") else None
        if kind is None and hasattr(function, "__qualname__"):
            kind = f"the local {function.__qualname__}" if "<locals>" in function.__qualname__ else None
        if inspect.isbuiltin(function):
            kind = f"the function {function.__name__}"
        selector, scope = "alfish.undescribed", self._scope(name)
        what = f"{name} is {kind or f'an object of {type(function).__name__}'}"
        self._lines.append(f"{scope}/{selector}.what = {what!r}")
        return f"@{scope}/{selector}" + "()" * (not callable(part))

    def _scope(self, name: str) -> str:
        base = scope = re.sub(r"\W+", "_", name.removeprefix("Trainer.")).strip("_")
        number = 1
        while scope in self._scopes:
            number += 1
            scope = f"{base}_{number}"
        self._scopes.add(scope)
        return scope


def _is_importable(part: Any, module: str, qualname: str) -> bool:
    """Returns True if the module has the given class or function under the given name."""
    if module == "builtins":
        return False
    found: Any = sys.modules.get(module)
    for attribute in qualname.split("."):
        found = getattr(found, attribute, None)
    return found is part


def _bound_modules() -> set[str]:
    """Returns the modules of all parts in the current configuration."""
    keys = (*gin_internals.bindings(), *gin_internals.referred())
    modules = {gin_internals.configurable(selector).__module__ for _, selector in keys}
    return {module for module in modules if not module.startswith("gin.")}
