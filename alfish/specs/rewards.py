"""The spaces of rewards: one number, or a vector with a name for each entry."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from alfish.errors import UsageError

# Results of metrics and evaluations end in these words.
TAKEN = ("n", "nonfinite")


class VectorReward(spaces.Box):
    """The space of a vector reward, `[R]` float32.

    Args:
      names: of the entries; also an attribute.

    Raises:
      UsageError: a name occurs twice, or would be confused with another result.
    """

    def __init__(self, names: Sequence[str]):
        super().__init__(-np.inf, np.inf, (len(names),), np.float32)
        self.names = tuple(names)
        for name in names:
            if not name or "/" in name or name in TAKEN or self.names.count(name) > 1:
                raise UsageError(
                    f"the entries of the reward are named {list(names)}; each needs a name of its own, without '/' and "
                    f"other than {' and '.join(TAKEN)}"
                )

    def __repr__(self) -> str:
        return f"VectorReward({', '.join(self.names)})"

    def __eq__(self, other: Any) -> bool:
        return super().__eq__(other) and reward_names(other) == self.names


def reward_spec(entries: int | Sequence[str] | None = None) -> spaces.Box:
    """Returns the spec of a scalar reward, or of a vector with this number of entries, or with these names."""
    if entries is None:
        return spaces.Box(-np.inf, np.inf, (), np.float32)
    return VectorReward([str(entry) for entry in range(entries)] if isinstance(entries, int) else entries)


def reward_names(reward_spec: spaces.Box) -> tuple[str, ...]:
    """Returns the names of the entries of a reward, which are their numbers if it has none; empty for a scalar."""
    return getattr(reward_spec, "names", tuple(map(str, range(sum(reward_spec.shape)))))
