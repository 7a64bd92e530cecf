"""Action masks: a leaf of the observation with the choices that the environment allows.

The mask of row t belongs to the action at row t. Its space is an `ActionMask`: an entry is 1 if the choice is allowed,
and 0 if it is forbidden. The entries are in the order of the action's leaves. Discrete has n entries, MultiDiscrete
n_1 + n_2 + ..., and MultiBinary two for each bit ("may be 0", "may be 1"), or one ("may be 1"). A Box has no entries.

A mask cannot express constraints between the entries of an action, or constraints that depend on a Box entry.
"""

import itertools
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.specs.spaces import shape_of, torch_dtype


class ActionMask(spaces.MultiBinary):
    """The space of an action mask, `[n]` int8. It marks the leaf of the mask in spaces and specs."""

    def __init__(self, n: int):
        super().__init__(n)

    def __repr__(self) -> str:
        return f"ActionMask({self.n})"


def check_entries(mask: Any, name: str) -> None:
    """Raises UsageError unless all entries of an environment's mask are 0, 1 or bools."""
    entries = nest.as_array(mask)
    if entries.dtype.kind not in "biuf" or not ((entries == 0) | (entries == 1)).all():
        shown = np.array2string(entries, threshold=20).replace("\n", "")
        raise UsageError(f"{name} returned the action mask {shown}; its entries must be 1 (allowed) or 0 (forbidden)")


class MaskLayout:
    """Positions of an action's choices in its mask.

    Args:
      action_spec: canonical spec of the actions, see `alfish.specs`.
      size: number of entries of the mask; stored as an attribute.
      name: name of the mask, for messages.

    Raises:
      UsageError: the action has no choices, or `size` is not the number of choices.
    """

    def __init__(self, action_spec: Nest, size: int, name: str):
        leaves = nest.leaves(action_spec)
        choices = [_choices(leaf) for leaf in leaves]  # number of choices of each entry, by leaf
        counts = list(itertools.chain(*choices))
        num_bits = [shape_of(leaf)[0] if isinstance(leaf, spaces.MultiBinary) else 0 for leaf in leaves]
        total, short = sum(counts), sum(counts) - sum(num_bits)
        if not counts:
            raise UsageError(
                f"{name} is an action mask, but the action {action_spec} has no choices; leave the mask out"
            )
        if size not in (total, short):
            other = f", or {short} with one for each bit" if short < total else ""
            raise UsageError(
                f"{name} is an action mask of {size} entries, but the action {action_spec} has {total} choices{other}; "
                "give it one entry for each choice"
            )
        self.size = size
        self._is_short = size < total  # whether the mask has one entry for each bit
        self._num_bits = num_bits if self._is_short else [0] * len(leaves)
        self._sizes = [sum(each) - bits for each, bits in zip(choices, self._num_bits)]  # mask entries of each leaf
        self._starts = np.cumsum([0, *counts[:-1]])  # start of each entry's choices; each bit has two choices

    def split(self, mask: torch.Tensor) -> list[torch.Tensor | None]:
        """Returns the mask of each leaf, `[..., choices]` bool, from the mask of the whole action, `[..., size]`.

        A bit has two choices in the result, even if it has one entry in `mask`. A Box has None instead of a mask.
        """
        allowed = mask.bool()
        parts = [allowed] if len(self._sizes) == 1 else allowed.split(self._sizes, -1)
        if self._is_short:
            parts = [
                torch.stack([torch.ones_like(part), part], -1).flatten(-2) if bits else part
                for part, bits in zip(parts, self._num_bits)
            ]
        return [part if size else None for part, size in zip(parts, self._sizes)]

    def forbids(self, mask: np.ndarray, action: Nest) -> np.ndarray:
        """Returns whether masks `[N, size]` forbid actions (leaves `[N, ...]`, canonical), `[N]` bool."""
        leaves = [leaf.reshape(len(mask), -1) for leaf, n in zip(nest.leaves(action), self._sizes) if n]
        index = self._starts + np.concatenate(leaves, 1)
        return np.logical_not(np.take_along_axis(self.whole(mask), index, 1)).any(1)

    def is_empty(self, mask: np.ndarray) -> np.ndarray:
        """Returns whether masks `[N, size]` allow no choice for some entry of the action, `[N]` bool."""
        return (np.add.reduceat(self.whole(mask), self._starts, 1, np.intp) == 0).any(1)

    def whole(self, mask: np.ndarray) -> np.ndarray:
        """Returns masks `[N, choices]` bool with two entries for each bit, from masks `[N, size]`."""
        allowed = mask != 0
        if not self._is_short:
            return allowed
        parts = np.split(allowed, np.cumsum(self._sizes)[:-1], 1)
        return np.concatenate([
            np.stack([np.ones_like(part), part], -1).reshape(len(part), -1) if bits else part
            for part, bits in zip(parts, self._num_bits)
        ], 1)  # fmt: skip


class MaskReader:
    """Reads the action mask in observations.

    Args:
      path: keys that lead to the mask in the observation, such as ('task', 'mask').
      layout: positions of the choices in the mask.
    """

    def __init__(self, path: tuple[Any, ...], layout: MaskLayout):
        self.path, self.layout = path, layout
        self.name = ".".join(map(str, ("observation", *path)))

    def __call__(self, observation: Nest) -> list[torch.Tensor | None]:
        """Returns the mask of each leaf of the action, see `MaskLayout.split`."""
        return self.layout.split(self.mask(observation))

    def mask(self, observation: Nest) -> Any:
        """Returns the mask in an observation, unchanged."""
        for key in self.path:
            observation = observation[key]
        return observation

    def is_empty(self, observation: Nest) -> np.ndarray:
        """Returns whether rows `[N]` allow no choice for some entry of the action, `[N]` bool."""
        return self.layout.is_empty(nest.as_array(self.mask(observation)))


def mask_path(observation_spec: Nest) -> tuple[Any, ...] | None:
    """Returns the keys of the action mask; None without a mask.

    Raises:
      UsageError: the observation has several masks.
    """
    named = zip(nest.keys(observation_spec), nest.named_leaves(observation_spec, "observation"))
    found = [(keys, name) for keys, (name, leaf) in named if isinstance(leaf, ActionMask)]
    if len(found) > 1:
        raise UsageError(f"{' and '.join(name for _, name in found)} are action masks; join them into one leaf")
    return found[0][0] if found else None


def mask_reader(observation_spec: Nest, action_spec: Nest) -> MaskReader | None:
    """Returns the reader of the action mask; None if the observation has no mask."""
    path = mask_path(observation_spec)
    if path is None:
        return None
    leaf = observation_spec
    for key in path:
        leaf = leaf[key]
    return MaskReader(path, MaskLayout(action_spec, leaf.n, ".".join(map(str, ("observation", *path)))))


def uniform_choice(mask: torch.Tensor) -> torch.Tensor:
    """Returns a uniformly random allowed choice, `[...]` int64 from `[..., n]` bool.

    If no choice is allowed, any choice may be drawn.
    """
    return (torch.rand(mask.shape, device=mask.device) + mask).argmax(-1)  # allowed choices have values >= 1


def uniform_action(leaf: spaces.Space, mask: torch.Tensor) -> torch.Tensor:
    """Returns uniformly random allowed actions of one leaf, `[B, ...]` from `[B, choices]` bool."""
    if isinstance(leaf, spaces.Discrete):
        return uniform_choice(mask)
    parts = mask.split(_choices(leaf), -1)
    return torch.stack([uniform_choice(part) for part in parts], -1).to(torch_dtype(leaf))


def num_choices(action_spec: Nest) -> int:
    """Returns the number of choices in an action; each bit has two."""
    return sum(sum(_choices(leaf)) for leaf in nest.leaves(action_spec))


def _choices(leaf: spaces.Space) -> list[int]:
    """Returns the number of choices of each entry of an action leaf; an empty list for a Box."""
    if isinstance(leaf, spaces.Discrete):
        return [int(leaf.n)]
    if isinstance(leaf, spaces.MultiDiscrete):
        return [int(n) for n in leaf.nvec]
    return [2] * shape_of(leaf)[0] if isinstance(leaf, spaces.MultiBinary) else []
