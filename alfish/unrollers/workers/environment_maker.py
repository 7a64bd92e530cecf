"""The environment factory and its gin configuration, in the form in which they are sent to workers.

A worker parses the configuration itself, because it shares no state with the trainer. The configuration is sent as
text, which cannot express values such as a lambda. The worker raises UsageError if an environment reads such a value.
"""

import copy
import importlib
import re
import reprlib
from collections.abc import Callable
from typing import Any

import gin

from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.parameters import description, gin_internals
from alfish.processes.channel import NOT_IMPORTABLE, from_bytes, to_bytes


class EnvironmentMaker:
    """Environment factory in a form that can be sent to a worker.

    If gin binds the factory to `Trainer.environment`, the text of the configuration is sent, because scoped references
    of gin cannot be pickled. Any other factory is pickled.

    Args:
      factory: factory of environments, called with the keywords `seed` and `num_envs`.

    Raises:
      UsageError: a worker cannot import the factory, or an object that the configuration names.
    """

    def __init__(self, factory: Callable[..., Environment]):
        self._config, self._pickled = gin_internals.config_text(), b""
        self._left_out = _left_out()
        is_configured = bool(self._config or self._left_out)
        # If there is no configuration, a worker does not need the modules and parts that gin knows.
        self._modules = _modules_of(self._config) if is_configured else []
        parts = description.registered() if is_configured else []
        self._parts = [(module, name) for module, name in parts if module != "__main__"]
        # Compares the wrapped objects, because gin makes a new wrapper of a scoped reference at each access.
        bound = _bound()
        if bound is None or _origin(bound.configurable.wrapped) is not _origin(factory):
            self._pickled = to_bytes(factory, "Trainer.environment")
        else:
            own = bound.configurable.selector  # name of the factory, which would read left-out values of its parameters
            for name, sentence in self._left_out.items():
                if name.rpartition("/")[2].rpartition(".")[0] == own:
                    raise UsageError(sentence)

    def __call__(self) -> Callable[..., Environment]:
        """Returns the factory. Called in the worker."""
        for module in self._modules:
            importlib.import_module(module)
        for part in self._parts:
            description.register(*part)
        gin.parse_config(self._config)
        for name, sentence in self._left_out.items():
            gin.bind_parameter(name, _LeftOut(sentence))
        return from_bytes(self._pickled) if self._pickled else copy.deepcopy(_bound())  # resolves references


def _modules_of(config: str) -> list[str]:
    """Returns the modules that a worker must import before it parses the configuration: all modules that gin knows."""
    modules = set()
    for selector, configurable in gin_internals.configurables().items():
        module = configurable.__module__
        if module == "__main__" and re.search(rf"\b{selector.rpartition('.')[2]}\b", config):
            raise UsageError(NOT_IMPORTABLE.format(name="the configuration", thing=repr(selector)))
        if module != "__main__" and module.partition(".")[0] != "gin":
            modules.add(module)
    return sorted(modules)


class _LeftOut:
    """Placeholder in a worker for a value that a text cannot express; reading it raises UsageError."""

    def __init__(self, sentence: str):
        self._sentence = sentence

    def __deepcopy__(self, memo: Any) -> Any:  # gin copies a bound value before passing it to a call
        raise UsageError(self._sentence)


def _left_out() -> dict[str, str]:
    """Returns a sentence for each bound value that is missing from the configuration's text, by scope/name.parameter.

    Configurables that the main program defines are not included, because a worker cannot call them.
    """
    classes, found = gin_internals.configurables(), {}
    for (scope, selector), values in gin_internals.bindings().items():
        for parameter, value in values.items():
            if not gin_internals.is_writable(value) and classes[selector].__module__ != "__main__":
                name = f"{selector.rpartition('.')[2]}.{parameter}"
                thing = getattr(value, "__qualname__", reprlib.repr(value))
                key = f"{scope}/{selector}.{parameter}" if scope else f"{selector}.{parameter}"
                found[key] = NOT_IMPORTABLE.format(name=name, thing=thing)
    return found


def _bound() -> Any:
    """Returns the reference of gin that is bound to `Trainer.environment`; None if there is none."""
    try:
        value = gin.get_bindings("alfish.Trainer", resolve_references=False).get("environment")
    except ValueError:  # the trainer is not registered
        return None
    return value if value is not None and gin_internals.is_reference(value) else None


def _origin(factory: Any) -> Any:
    while hasattr(factory, "__wrapped__"):
        factory = factory.__wrapped__
    return factory
