"""Detects bindings that are never read: typos, and settings of parts that the Trainer does not have."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from alfish import errors
from alfish.configuration.bindings import MACRO, Binding, Reading, references
from alfish.configuration.sentences import parameter_read, scope_meant
from alfish.configuration.wrong_kinds import takes_parts
from alfish.errors import UsageError
from alfish.parameters import gin_internals
from alfish.parameters.gin_internals import Key

Values = Mapping[Key, Mapping[str, Any]]


def refuse_unread(reading: Reading) -> None:
    """Raises UsageError if a bound parameter is never read; call this after everything is built.

    A configurable is reachable if it was called while the Trainer was built, or if a reachable binding refers to it
    (`@make_environment`). If a later layer (another file, or the caller's bindings) replaces a part that an earlier
    layer configures, the settings of the replaced part are accepted. Settings that later layers override in each scope
    are also accepted. A setting that bindings of earlier layers override in each scope, in the scope itself or for a
    subclass, is refused.

    Raises:
      UsageError: parameters are not read; the message names them and the layers that bind them.
    """
    reached = _closure(gin_internals.called(), reading.values())
    unread = {
        one.name: one.layer
        for one in reading.last()
        if one.key[1] != MACRO
        and one.layer not in reading.saved
        and not _is_read(one.key, reached)
        and not _may_have_been_read(one, reading, reached)
    }
    if unread:
        names, layers = sorted(unread), " and ".join(dict.fromkeys(unread.values()))
        meant = scope_meant(names[0], reached) or parameter_read(names[0], sorted({one[1] for one in reached}))
        remedy = "remove the binding, or refer to its class or function with @"
        if not errors.is_command():
            remedy = "leave it out, or give its class or function to the part that takes it"
        raise UsageError(
            f"nothing reads {', '.join(names)}, bound in {layers}: no part of this Trainer uses it; {remedy}"
            f"{meant * (len(names) == 1)}"
        )
    for one in reading.last():
        if one.layer not in reading.saved and (overriding := _overriding(one, reading, reached)):
            others = " and ".join(overriding)
            verb = "override" if len(overriding) > 1 else "overrides"
            raise UsageError(
                f"{one.name}, bound in {one.layer}, has no effect, because {others} {verb} it; bind {others} instead"
            )
    _refuse_supplied(reading, reached)


def _refuse_supplied(reading: Reading, reached: set[Key]) -> None:
    """Raises UsageError for a bound parameter that was never read because each call passed a value.

    Checks only seeds and parameters without a default, such as input sizes. Other parameters are not
    checked, because a class may pass them to its base class.
    """
    left_to_gin = gin_internals.called_with()
    for one in reading.last():
        readers = [key for key in reached if key[1] == one.key[1] and one.key in _keys_read_by(*key)]
        if one.layer in reading.saved or not readers or not _is_for_callers(one.key[1], one.parameter):
            continue
        if all(key in left_to_gin and one.parameter not in left_to_gin[key] for key in readers):
            instead = "bind Trainer.seed" if one.parameter == "seed" else "remove the binding"
            raise UsageError(
                f"{one.name}, bound in {one.layer}, has no effect, because the code that calls it passes its own "
                f"value; {instead}"
            )


def _is_for_callers(selector: str, parameter: str) -> bool:
    found = inspect.signature(gin_internals.configurable(selector)).parameters.get(parameter)
    return parameter == "seed" or (found is not None and found.default is inspect.Parameter.empty)


def _overriding(binding: Binding, reading: Reading, reached: set[Key]) -> list[str]:
    """Returns the names of bindings in earlier layers that override a binding in every scope.

    Such a binding has a longer scope, or belongs to a subclass that passes its value to the class of the binding.
    """
    (_, selector), parameter = binding.key, binding.parameter
    later = reading.later_layers(binding.layer)
    earlier = {
        one.key: one.name
        for one in reading.last()
        if one.parameter == parameter and one.layer not in (binding.layer, *later)
    }
    found, left_to_gin = [], gin_internals.called_with()
    for key in sorted(one for one in reached if one[1] == selector):
        read = _keys_read_by(*key)
        if binding.key not in read:
            continue
        overriding = [earlier[one] for one in read[read.index(binding.key) + 1 :] if one in earlier]
        if key in left_to_gin and parameter not in left_to_gin[key]:  # each call passed a value
            derived = [one for one in reached if one[0] == key[0] and _is_derived(one[1], selector)]
            overriding += [earlier[one] for each in derived for one in _keys_read_by(*each) if one in earlier]
        if not overriding:
            return []
        found += overriding[-1:]
    return list(dict.fromkeys(found))


def _is_derived(selector: str, base: str) -> bool:
    """Returns whether the class of a selector is a subclass of another one."""
    classes = gin_internals.configurable(selector), gin_internals.configurable(base)
    return all(map(inspect.isclass, classes)) and classes[0] is not classes[1] and issubclass(*classes)


def _closure(keys: Iterable[Key], values: Values) -> set[Key]:
    """Returns the keys, and all keys that their values refer to directly or indirectly."""
    reached = set(keys)
    frontier = list(reached)
    while frontier:
        for key in _keys_read_by(*frontier.pop()):
            for value in values.get(key, {}).values():
                found = set(references(value, values)) - reached
                reached |= found
                frontier += found
    return reached


def _is_read(key: Key, reached: Iterable[Key]) -> bool:
    return any(key in _keys_read_by(scope, selector) for scope, selector in reached)


def _keys_read_by(scope: str, selector: str) -> list[Key]:
    """Returns the keys that a call of `selector` reads in a scope; in `a/b`, the keys of '', 'a' and 'a/b'."""
    parts = scope.split("/") if scope else []
    return [("/".join(parts[:i]), selector) for i in range(len(parts) + 1)]


def _may_have_been_read(binding: Binding, reading: Reading, reached: set[Key]) -> bool:
    """Returns True if a later layer replaced a part that may have read the binding.

    The replaced part was not built, so its own parts are unknown: if it takes other parts, any binding may have been
    read.
    """
    later = reading.later_layers(binding.layer)
    values: dict[Key, dict[str, Any]] = {}
    replaced: set[Key] = set()
    for one in reading.bindings:
        bound = values.setdefault(one.key, {})
        if one.layer in later and _is_read(one.key, reached):
            before = bound.get(one.parameter, _default(one.key[1], one.parameter))
            if before is None and takes_parts(one.key[1], one.parameter):
                return True  # the configurable computes the default itself, as for Trainer.listeners
            replaced |= _closure(references(before, values), values) - set(references(one.value, values))
        bound[one.parameter] = one.value
    return any(selector == binding.key[1] or takes_parts(selector) for _, selector in replaced)


def _default(selector: str, parameter: str) -> Any:
    """Returns the default of a parameter, as a reference if the default is a configurable."""
    found = inspect.signature(gin_internals.configurable(selector)).parameters.get(parameter)
    if found is None or not callable(found.default):  # the parameter is in **kwargs, or its default is not a part
        return None if found is None else found.default
    known = gin_internals.selector_of(found.default)
    return gin_internals.reference_to(known) if known else found.default
