"""Checks of macros: names that a configuration sets, and refers to as `%name`."""

from typing import Any

import gin

from alfish.configuration.bindings import MACRO, Binding, Reading, macros
from alfish.configuration.sentences import close_names, parameter_meant
from alfish.errors import UsageError
from alfish.parameters import differences, gin_internals


def refuse_unused(reading: Reading) -> None:
    """Raises UsageError if no value refers to a macro; such a macro is usually a parameter that lacks its class."""
    used = {name for one in reading.bindings for name in macros(one.value)}
    for one in reading.bindings:
        if one.key[1] == MACRO and one.name not in used:
            raise UsageError(
                f"{one.layer} sets {one.name}, but nothing refers to it as %{one.name}{parameter_meant(one.name)}"
            )


def refuse_endless(reading: Reading) -> None:
    """Raises UsageError if values with expanded macros are too long: nested macros can grow exponentially."""
    if any(one.key[1] == MACRO for one in reading.bindings):
        differences.check_macros(gin.config_str())


def without_macros(value: Any, binding: Binding, within: tuple[str, ...] = ()) -> Any:
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
        return without_macros(bound[name, MACRO]["value"], binding, (*within, name))
    if isinstance(value, (list, tuple)):
        return type(value)(without_macros(inner, binding, within) for inner in value)
    if isinstance(value, dict):
        return {key: without_macros(inner, binding, within) for key, inner in value.items()}
    return value
