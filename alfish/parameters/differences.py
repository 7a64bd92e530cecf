"""Comparison of configurations as texts, usually without the budget and `stop_at`, because a run may be extended."""

import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence

ENDS = "num_env_steps|num_iterations|num_updates|wall_seconds|stop_at"
BUDGET_LINE = re.compile(rf"^Trainer\.({ENDS}) = .*$", re.MULTILINE)


MACRO = re.compile(r"[\w/]+ = ")
BINDING = re.compile(r"([\w./]+) = (.*)")
QUOTED_OR_MACRO = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|%([\w./]+)""")


def values(config: str) -> dict[str, str]:
    """Returns the value of each binding in a text that gin has written; names are without modules, as 'PPO.gamma'.

    Macros are replaced by their values.
    """
    found = (BINDING.fullmatch(line) for line in _without_macros(_lines(config)))
    return {tail(one[1], 2): " ".join(one[2].split()) for one in found if one}


def _lines(config: str) -> list[str]:
    """Returns the lines of a text that gin has written, in which a long value continues on indented lines."""
    return re.sub(r"\\?\n[ \t]+", " ", config).splitlines()


def _without_macros(lines: Sequence[str]) -> list[str]:
    """Returns lines with the values of macros in place of macros, and without their definitions."""
    found = [BINDING.fullmatch(line) for line in lines]
    macros = {one[1]: one[2] for one in found if one and "." not in one[1]}
    if not macros:
        return list(lines)
    return [_resolved(line, macros) for line, one in zip(lines, found) if one is None or one[1] not in macros]


def _resolved(value: str, macros: Mapping[str, str], depth: int = 0) -> str:
    """Returns a value with macros replaced, also within their values; a macro that refers to itself stays."""

    def replaced(found: re.Match) -> str:
        name = found[1]
        return found[0] if name not in macros or depth > len(macros) else _resolved(macros[name], macros, depth + 1)

    return QUOTED_OR_MACRO.sub(replaced, value)


def reference(value: str) -> str:
    """Returns `scope/Name` of a reference such as `@scope/module.Name()`; another value as it is."""
    return tail(value[1:].removesuffix("()"), 1) if value.startswith("@") else value


def tail(name: str, length: int) -> str:
    """Returns the last `length` parts of a name with dots, and its scope."""
    scope, slash, rest = name.rpartition("/")
    return scope + slash + ".".join(rest.split(".")[-length:])


def difference(before: str, after: str, with_budget: bool = False) -> str:
    """Returns the lines that differ, as `- old` and `+ new`; '' if the configurations are equal."""
    changes = difflib.unified_diff(_settings(before, with_budget), _settings(after, with_budget), lineterm="", n=0)
    return "\n".join(line for line in changes if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def digest(config: str) -> str:
    """Returns a hash that is equal for two configurations if they have no `difference`."""
    return hashlib.sha256("\n".join(_settings(config)).encode()).hexdigest()


def _settings(config: str, with_budget: bool = False) -> list[str]:
    lines = config.splitlines()
    if any(MACRO.match(line) for line in lines):
        lines = _without_macros(_lines(config))
    if not with_budget:
        lines = BUDGET_LINE.sub("", "\n".join(lines)).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]
