"""Search for values that are not finite in the rows of an unroll or of one step.

A finite sum shows that all values are finite, since any nan or infinity remains in the sum. A sum of finite values may
overflow, so after a sum that is not finite the values themselves are tested.
"""

import math
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.data import TimeStep
from alfish.errors import RunError
from alfish.nest import as_tensor


def check_finite(time_step: TimeStep) -> None:
    """Tests an unroll's rewards, discounts and observations.

    Args:
      time_step: leaves `[T, B, ...]`, arrays or tensors.

    Raises:
      RunError: names the environment, the row and the leaf of the first value that is not finite.
    """
    leaves = [time_step.reward, time_step.discount, *nest.leaves(time_step.observation)]
    if _sum_is_finite(leaves):
        return
    paths = nest.paths(time_step.observation)
    names = ["a reward", "a discount", *(f"an observation {path}".rstrip() for path in paths)]
    for name, leaf in zip(names, leaves):
        leaf = as_tensor(leaf)
        bad = (~torch.isfinite(leaf)).flatten(2).any(-1) if leaf.ndim > 2 else ~torch.isfinite(leaf)
        if bad.any():
            row, column = (int(i) for i in bad.nonzero()[0])
            env_id = int(time_step.env_id[row, column])
            for action in nest.leaves(time_step.prev_action):
                before = as_tensor(action)[row, column]
                if before.is_floating_point() and not before.isfinite().all():
                    raise RunError(
                        f"the policy's action before row {row} of the unroll in environment {env_id} is not finite: "
                        f"{before.cpu().numpy()}; look at rollout_step, and at the parameters after the last update"
                    )
            raise RunError(
                f"environment {env_id} returned {name} that is not finite in row {row} of the unroll: "
                f"{leaf[row, column].cpu().numpy()}; fix the environment, since such rows cannot train"
            )


def nonfinite_rows(time_step: TimeStep) -> np.ndarray | None:
    """`[B]` bool mask of rows whose reward or observation is not finite; None if there are none.

    Args:
      time_step: one step, arrays `[B, ...]`.
    """
    leaves: list[Any] = [time_step.reward, *nest.leaves(time_step.observation)]
    if _sum_is_finite(leaves):
        return None
    floats = [leaf for leaf in leaves if leaf.dtype.kind == "f"]
    bad = np.any([~np.isfinite(leaf).reshape(len(leaf), -1).all(1) for leaf in floats], axis=0)
    return bad if bad.any() else None


def _sum_is_finite(leaves: list[Any]) -> bool:
    """True if the sum of all floats in the leaves, arrays or tensors, is finite."""
    total: Any = 0
    for leaf in leaves:
        if type(leaf) is not np.ndarray:
            total = total + leaf.sum() if leaf.is_floating_point() else total
        elif leaf.dtype.kind == "f":
            total = total + np.add.reduce(leaf, axis=None)  # `sum` without its function in Python
    return math.isfinite(total)
