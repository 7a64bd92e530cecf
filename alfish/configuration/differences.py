"""Comparison of configurations as texts, usually without the budget and `stop_at`, because a run may be extended."""

import difflib
import hashlib
import re

ENDS = "num_env_steps|num_iterations|num_updates|wall_seconds|stop_at"
BUDGET_LINE = re.compile(rf"^Trainer\.({ENDS}) = .*$", re.MULTILINE)


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
