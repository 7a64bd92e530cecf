"""Comparison of configurations as texts. Budget and `stop_at` are usually left out, because runs may be extended."""

import ast
import difflib
import hashlib
import pprint
import re
import sys
from collections.abc import Sequence
from typing import Any

from alfish.errors import UsageError


def literal(text: str) -> Any:
    """Returns the value of a literal, such as `{'a': [1, 2.5]}`.

    Raises:
      ValueError: the text is not a literal, or is nested too deeply.
    """
    try:
        return ast.literal_eval(text)
    # Deeply nested text, such as 50,000 minus signs, raises MemoryError or RecursionError.
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"it is not a literal of Python: {type(error).__name__}") from error


ENDS = "num_env_steps|num_iterations|num_updates|wall_seconds|stop_at"
BUDGET_LINE = re.compile(rf"^Trainer\.({ENDS}) = .*$", re.MULTILINE)
MAX_EXPANDED = 2**22  # maximum number of characters of a configuration after its macros are expanded
MAX_MACROS = 100  # maximum depth of macros within macros


MACRO = re.compile(r"[\w/]+ = ")
BINDING = re.compile(r"([\w./]+) = (.*)")
BRACKETS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[{}\[\](),]|[^'"{}\[\](),]+|.""")
QUOTED_OR_MACRO = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|%([\w./]+)""")


def values(config: str, where: str = "the configuration") -> dict[str, str]:
    """Returns the value of each binding in a text written by gin, by names without modules, such as 'PPO.gamma'.

    Macros are replaced by their values.

    Raises:
      UsageError: the values of macros are too long; the message names `where`.
    """
    try:
        found = (BINDING.fullmatch(line) for line in _without_macros(_lines(config)))
        return {tail(one[1], 2): _canonical(" ".join(one[2].split())) for one in found if one}
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def check_macros(config: str) -> None:
    """Raises UsageError if macros in a text written by gin have values that are too long; see `values`."""
    _without_macros(_lines(config))


def _lines(config: str) -> list[str]:
    """Returns the lines of a text written by gin, with indented continuation lines joined."""
    return re.sub(r"\\?\n[ \t]+", " ", config).splitlines()


def _without_macros(lines: Sequence[str]) -> list[str]:
    """Returns lines in which macros are replaced by their values, without the definitions of macros.

    A macro that refers to itself is not replaced.

    Raises:
      UsageError: the values have more than `MAX_EXPANDED` characters, or macros are nested more than `MAX_MACROS` deep.
    """
    found = [BINDING.fullmatch(line) for line in lines]
    macros = {one[1]: one[2] for one in found if one and "." not in one[1]}
    if not macros:
        return list(lines)
    whole: dict[str, str] = {}
    left = MAX_EXPANDED

    def resolved(value: str, within: tuple[str, ...] = ()) -> str:
        def replaced(found: re.Match) -> str:
            nonlocal left
            name = found[1]
            if name not in macros or name in within:
                return found[0]
            if name not in whole:
                if len(within) >= MAX_MACROS:
                    raise UsageError(f"more than {MAX_MACROS} macros refer to each other, as %{name} does")
                whole[name] = resolved(macros[name], (*within, name))
            left -= len(whole[name])
            if left < 0:  # checked before expansion: 40 macros with two references each would expand to 2**40 letters
                raise UsageError(f"macros have values of more than {MAX_EXPANDED:,} characters, as %{name} has")
            return whole[name]

        return QUOTED_OR_MACRO.sub(replaced, value)

    return [resolved(line) for line, one in zip(lines, found) if one is None or one[1] not in macros]


def _canonical(value: str) -> str:
    """Returns a normal form of a value: integral floats as ints, lists as tuples, and dicts with sorted entries."""
    try:
        return pprint.pformat(_plain(literal(value)), width=sys.maxsize)
    except (ValueError, RecursionError):  # the value has a reference, or is nested too deeply
        return _sorted_dicts(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sorted_dicts(text: str) -> str:
    """Returns a line with the entries of dicts sorted."""
    levels: list[tuple[str, list[str]]] = [("", [""])]  # stack of brackets: the opening bracket, and the entries
    for token in BRACKETS.findall(text):
        if token in ("{", "[", "("):
            levels.append((token, [""]))
        elif token in ("}", "]", ")") and len(levels) > 1:
            opening, entries = levels.pop()
            if opening == "{":
                entries = sorted(entry.strip() for entry in entries)
            separator = ", " if opening == "{" else ","
            levels[-1][1][-1] += opening + separator.join(entries) + token
        elif token == "," and len(levels) > 1:
            levels[-1][1].append("")
        else:
            levels[-1][1][-1] += token
    return text if len(levels) > 1 else levels[0][1][0]


def reference(value: str) -> str:
    """Returns `scope/Name` of a reference such as `@scope/module.Name()`; returns other values unchanged."""
    return tail(value[1:].removesuffix("()"), 1) if value.startswith("@") else value


def name_of(value: str) -> str:
    """Returns the name in a reference such as `@scope/module.Name()`; returns other values unchanged."""
    return reference(value).rpartition("/")[2] if value.startswith("@") else value


def tail(name: str, length: int) -> str:
    """Returns the last `length` parts of a dotted name, with its scope."""
    scope, slash, rest = name.rpartition("/")
    return scope + slash + ".".join(rest.split(".")[-length:])


def difference(before: str, after: str, with_budget: bool = False) -> str:
    """Returns the lines in which two configurations differ, as `- old` and `+ new`; '' if there are none.

    The order of entries in dicts is ignored, because older runs were saved with sorted entries.
    """
    old, new = (_settings(_comparable(without_empty_scopes(text)), with_budget) for text in (before, after))
    changes = difflib.unified_diff(old, new, lineterm="", n=0)
    return "\n".join(line for line in changes if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def _comparable(config: str) -> str:
    """Returns a text with one line for each value, in which the entries of dicts are sorted."""
    return "\n".join(_sorted_dicts(line.replace(" =  ", " = ", 1)) for line in _lines(config))


def without_empty_scopes(config: str) -> str:
    """Returns a text in which references have no scopes without bindings; older versions wrote such scopes."""
    bound = {name.rpartition("/")[0] for name in re.findall(r"^([\w./]+)\.\w+ =", config, re.MULTILINE)}

    def renewed(found: re.Match) -> str:
        scope = found[1]
        return found[0] if any(f"{one}/".startswith(f"{scope}/") for one in bound) else "@"

    return re.sub(r"@([\w/]+)/", renewed, config)


def digest(config: str) -> str:
    """Returns a hash of a configuration without its budget; `config` is in gin's normal form, with sorted dicts."""
    return hashlib.sha256("\n".join(_settings(config)).encode()).hexdigest()


def _settings(config: str, with_budget: bool = False) -> list[str]:
    lines = config.splitlines()
    if any(MACRO.match(line) for line in lines):
        lines = _without_macros(_lines(config))
    if not with_budget:
        lines = BUDGET_LINE.sub("", "\n".join(lines)).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]
