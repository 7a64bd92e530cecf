"""Checks of rows: values must be finite, and discrete values must be inside their spaces.

If a sum is finite, all its values are finite, because nan and infinity remain in a sum. A sum of finite values may
overflow; therefore, if a sum is not finite, the values themselves are tested.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest
from alfish.data import TimeStep
from alfish.errors import RunError
from alfish.nest import Nest, as_tensor


def _name_nonfinite(time_step: TimeStep) -> None:
    """Raises RunError for the first row with a non-finite value, because such values in later rows may follow from it.

    Does nothing if all values are finite and only the sum has overflowed.
    """
    paths = nest.paths(time_step.observation)
    names = ["a reward", "a discount", *(f"an observation {path}".rstrip() for path in paths)]
    found: list[tuple[int, int, str, torch.Tensor]] = []  # row, column, name and value
    for name, leaf in zip(names, map(as_tensor, _numbers(time_step))):
        bad = (~torch.isfinite(leaf)).flatten(2).any(-1) if leaf.ndim > 2 else ~torch.isfinite(leaf)
        for row, column in bad.nonzero()[:1].tolist():
            found.append((row, column, name, leaf[row, column]))
    if not found:
        return
    row, column, name, value = min(found, key=lambda one: one[0])
    env_id = int(time_step.env_id[row, column])
    if (action := nonfinite_action(nest.at(nest.tensors(time_step.prev_action), (row, column)))) is not None:
        raise RunError(
            f"the policy's action before row {row} of the unroll in environment {env_id} is not finite: {action}; "
            "check rollout_step, and the parameters after the last update"
        )
    raise RunError(
        f"environment {env_id} returned {name} that is not finite in row {row} of the unroll: "
        f"{value.cpu().numpy()} as float32; fix the environment, because such rows cannot be trained on"
    )


def nonfinite_action(action: Nest) -> Any:
    """Returns the first leaf of one environment's action that has a non-finite value, as an array; None if none has."""
    for leaf in nest.leaves(action):
        if leaf.is_floating_point() and not leaf.isfinite().all():
            return leaf.cpu().numpy()
    return None


class RowCheck:
    """Tests that an unroll's values are finite, and that values of Discrete and Multi* leaves are inside their spaces.

    Calling the object tests rows, and waits for the device of the rows. Code that reads other values from the device
    can avoid a separate wait: it calls `sign`, reads the sign together with these values, and calls `judge`.

    Args:
      observation_spec: spec of the observations; leaves without a spec are tested for finite values only.
    """

    def __init__(self, observation_spec: Nest):
        finite = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
        named = enumerate(nest.named_leaves(observation_spec, "observation"))
        self._leaves = [(i, name, spec) for i, (name, spec) in named if isinstance(spec, finite)]
        self._sizes = [_sizes(spec) for _, _, spec in self._leaves]

    def __call__(self, time_step: TimeStep) -> None:
        """Tests leaves `[T, B, ...]`, arrays or tensors.

        Raises:
          RunError: a value is wrong; the message names the environment, the row and the leaf of the first wrong value.
        """
        self.judge(time_step, self.sign(time_step))

    def sign(self, time_step: TimeStep) -> Any:
        """Returns a number that is finite if all values are right; for tensors, a 0-d tensor on their device."""
        total = _total(_numbers(time_step))
        for _, _, wrong in self._choices(time_step):
            total = torch.where(wrong.any(), torch.nan, total if isinstance(total, torch.Tensor) else float(total))
        return total

    def judge(self, time_step: TimeStep, sign: float) -> None:
        """Raises RunError if a value is wrong.

        Args:
          time_step: rows `[T, B, ...]`.
          sign: result of `sign` for these rows, as a number.
        """
        if math.isfinite(sign):
            return
        _name_nonfinite(time_step)
        for (_, name, spec), leaf, wrong in self._choices(time_step):
            if wrong.any():
                row, column, *_ = (int(index) for index in wrong.nonzero()[0])
                raise RunError(
                    f"environment {int(time_step.env_id[row, column])} returned {leaf[row, column].tolist()} (counted "
                    f"from the lowest value of its space) as {name} in row {row} of the unroll, but its space is "
                    f"{spec}; make the space contain all values, which `alfish check-env` tests"
                )

    def _choices(
        self, time_step: TimeStep
    ) -> Iterator[tuple[tuple[int, str, spaces.Space], torch.Tensor, torch.Tensor]]:
        """Yields index, name and spec of each discrete leaf, its values, and the mask of values outside its space."""
        leaves = nest.leaves(time_step.observation) if self._leaves else []
        for k, place in enumerate(self._leaves):
            leaf = as_tensor(leaves[place[0]])
            if self._sizes[k].device != leaf.device:
                self._sizes[k] = nest.to(self._sizes[k], leaf.device)
            yield place, leaf, (leaf < 0) | (leaf >= self._sizes[k])


def _sizes(spec: spaces.Space) -> torch.Tensor:
    """Returns the number of possible values of each entry of a leaf."""
    if isinstance(spec, spaces.MultiBinary):
        return torch.tensor(2)
    return torch.as_tensor(spec.n if isinstance(spec, spaces.Discrete) else spec.nvec)  # type: ignore[attr-defined]


def refuse_nonfinite(time_step: TimeStep, episode: np.ndarray) -> None:
    """Raises RunError if an observation of an episode under way is not finite.

    Args:
      time_step: time step of tensors `[B, ...]`.
      episode: index of each environment's episode, `[B]`; -1 means that none is under way.
    """
    leaves = nest.leaves(time_step.observation)
    if math.isfinite(_total([leaf.numpy() if leaf.is_cpu else leaf for leaf in leaves])):  # numpy is faster
        return
    for name, leaf in nest.named_leaves(time_step.observation, "observation"):
        bad = (~leaf.isfinite()).reshape(len(leaf), -1).any(1).cpu().numpy() & (episode >= 0)
        for i in np.flatnonzero(bad)[:1]:
            where = f"in episode {episode[i]} of the evaluation"
            if (action := nonfinite_action(nest.at(time_step.prev_action, int(i)))) is not None:
                raise RunError(f"an action of the policy {where} is not finite: {action}; check predict_step")
            raise RunError(
                f"an environment returned an {name} that is not finite {where}; fix the environment, because the "
                "actions of the policy would be meaningless"
            )


def nonfinite_rows(time_step: TimeStep) -> np.ndarray | None:
    """Returns a `[B]` bool mask of the rows whose reward or observation is not finite; None without such rows.

    Args:
      time_step: time step of arrays `[B, ...]`.
    """
    leaves: list[Any] = [time_step.reward, *nest.leaves(time_step.observation)]
    if math.isfinite(_total(leaves)):
        return None
    floats = [leaf for leaf in leaves if leaf.dtype.kind == "f"]
    bad = np.any([~np.isfinite(leaf).reshape(len(leaf), -1).all(1) for leaf in floats], axis=0)
    return bad if bad.any() else None


def _numbers(time_step: TimeStep) -> list[Any]:
    return [time_step.reward, time_step.discount, *nest.leaves(time_step.observation)]


def _total(leaves: list[Any]) -> Any:
    """Returns the sum of all floats in the leaves; a 0-d tensor if the leaves are tensors."""
    total: Any = 0
    for leaf in leaves:
        if type(leaf) is not np.ndarray:
            total = total + leaf.sum() if leaf.is_floating_point() else total
        elif leaf.dtype.kind == "f":
            total = total + np.add.reduce(leaf, axis=None)  # `sum` without its Python wrapper
    return total
