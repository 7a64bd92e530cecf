"""Comparison of configurations as texts, usually without the budget and `stop_at`, because a run may be extended."""

import difflib
import hashlib
import re

ENDS = "num_env_steps|num_iterations|num_updates|wall_seconds|stop_at"
BUDGET_LINE = re.compile(rf"^Trainer\.({ENDS}) = .*$", re.MULTILINE)


BINDING = re.compile(r"([\w./]+) = (.*)")


def values(config: str) -> dict[str, str]:
    """Returns the value of each binding in a text that gin has written; names are without modules, as 'PPO.gamma'."""
    lines = re.sub(r"\\?\n[ \t]+", " ", config).splitlines()  # a long value continues on indented lines
    found = (BINDING.fullmatch(line) for line in lines)
    return {tail(one[1], 2): " ".join(one[2].split()) for one in found if one}


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
    lines = (config if with_budget else BUDGET_LINE.sub("", config)).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]
