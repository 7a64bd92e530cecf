"""What a program passed to a Trainer, as the gin configuration that builds it again.

A part is a class or function of a module, or a `functools.partial` of one. A partial's arguments hold for this part
only, so each has a scope of its own: `algorithm/alfish.algorithms.PPO.gamma = 0.98`. Parts that gin has no name for
are named in a comment, `# part: my_lab.nets:Net`, and registered before the text is parsed.
"""

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

from alfish.errors import UsageError
from alfish.parameters import gin_internals
from alfish.parameters.checking import checked

CONFIG_FILE = "config.gin"  # in a run's directory: what it was asked for
PART = re.compile(r"^# part: ([\w.]+):([\w.]+)$", re.MULTILINE)
HEADER = "# Made from a Trainer that was built in Python.\n"

# Those that were registered here, by their names in gin: module and qualified name.
_REGISTERED: dict[str, tuple[str, str]] = {}


def as_gin(arguments: Mapping[str, Any]) -> str:
    """The gin configuration that builds a Trainer again.

    What cannot be described stands as a reference to `undescribed`, which raises where the part is needed.

    Args:
      arguments: of the Trainer, by name; those that gin binds now are described as gin binds them.
    """
    bound = gin.get_bindings("alfish.Trainer", resolve_references=False)
    in_force = gin.config_str()
    writer = Writer()
    defaults = inspect.signature(gin.get_configurable("alfish.Trainer")).parameters
    for name, value in arguments.items():
        if name not in bound and value is not defaults[name].default:
            writer.bind("", "alfish.Trainer", name, value, f"Trainer.{name}")
    modules = writer.modules | (_bound_modules() if in_force else set())
    return HEADER + header(in_force) + writer.text(modules) + in_force


def header(text: str) -> str:
    """The lines that name the registered parts in a text of gin's."""
    return "".join(
        f"# part: {module}:{name}\n"
        for selector, (module, name) in sorted(_REGISTERED.items())
        if re.search(rf"\b{re.escape(selector.rpartition('.')[2])}\b", text)
    )


def register(module: str, name: str) -> None:
    """Gives gin a name for a class or function, unless it has one.

    Args:
      module: imported already.
      name: qualified, inside the module.

    Raises:
      UsageError: the module defines no such class or function. What it has imported does not count, so that a
        configuration of another person reaches no other module through it.
    """
    part: Any = sys.modules[module]
    for attribute in name.split("."):
        part = getattr(part, attribute, None)
    is_part = inspect.isclass(part) or (inspect.isfunction(part) and "." not in name)
    if not is_part or (part.__module__, part.__qualname__) != (module, name):
        remedy = "; define it in a module of its own, because each program is its own `__main__`"
        raise UsageError(f"there is no class or function {name!r} in {module}{remedy * (module == '__main__')}")
    if gin_internals.selector_of(part) is None:
        with gin.unlock_config():
            gin.external_configurable(part, name=name, module=module)
        _REGISTERED[f"{module}.{name}"] = module, name


def registered() -> list[tuple[str, str]]:
    """Module and qualified name of each part that was registered, for a process that reads the same configuration."""
    return list(_REGISTERED.values())


@gin.configurable(module="alfish")
@checked
def undescribed(*args: Any, what: str = gin.REQUIRED, **kwargs: Any) -> Any:
    """Stands for a part of a Trainer that a configuration cannot name.

    Args:
      what: the part, and why.

    Raises:
      UsageError: always.
    """
    raise UsageError(
        f"{what}, which no configuration can name: build the Trainer again in Python with this root_dir and call "
        "load_policy, or train with classes and functions of modules and plain arguments"
    )


class Writer:
    """Collects the bindings of parts as text.

    Attributes:
      modules: that the text needs imported.
      is_whole: whether everything could be described.
    """

    is_whole = True

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._parts: set[tuple[str, str]] = set()
        self._lines: list[str] = []
        self._scopes: set[str] = set()

    def text(self, modules: set[str] | None = None) -> str:
        """Parts, imports and bindings, a line each."""
        names = sorted((self.modules if modules is None else modules) - {"__main__"})
        parts = [f"# part: {module}:{name}" for module, name in sorted(self._parts)]
        return "".join(f"{line}\n" for line in [*parts, *(f"import {name}" for name in names), *self._lines])

    def bind(self, scope: str, selector: str, parameter: str, value: Any, name: str) -> None:
        """Adds a binding, and those of the parts in its value.

        Args:
          scope, selector, parameter: of gin; the scope may be ''.
          value: of the parameter.
          name: of the value in messages, as `Trainer.algorithm`.
        """
        prefix = f"{scope}/" if scope else ""
        index = len(self._lines)
        self._lines.insert(index, f"{prefix}{selector}.{parameter} = {self._value(value, name)}")

    def _value(self, value: Any, name: str) -> str:
        if isinstance(value, numbers.Real) and type(value) is not bool:  # numpy's too
            value = int(value) if isinstance(value, numbers.Integral) else float(value)
        elif isinstance(value, Path):
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
        target, arguments = part, {}
        if isinstance(part, functools.partial):
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
        scope = self._scope(name)
        for parameter, value in arguments.items():
            self.bind(scope, selector, parameter, value, f"{name}.{parameter}")
        return f"@{scope}/{selector}"

    def _undescribed(self, part: Any, name: str) -> str:
        self.is_whole = False
        function = part.func if isinstance(part, functools.partial) else part
        kind = "a lambda" if "<lambda>" in getattr(function, "__qualname__", "") else None
        if kind is None and hasattr(function, "__qualname__"):
            kind = f"the local {function.__qualname__}" if "<locals>" in function.__qualname__ else None
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
    """Whether a module has this class or function under its own name."""
    if module == "builtins":
        return False
    found: Any = sys.modules.get(module)
    for attribute in qualname.split("."):
        found = getattr(found, attribute, None)
    return found is part


def _bound_modules() -> set[str]:
    """Returns the modules of whatever is bound or referred to now."""
    keys = (*gin_internals.bindings(), *gin_internals.referred())
    modules = {gin_internals.configurable(selector).__module__ for _, selector in keys}
    return {module for module in modules if not module.startswith("gin.")}
