"""The specs of an environment's spaces and rewards, and zeros and random samples of a spec."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.specs.checks import check_learnable
from alfish.specs.masks import uniform_action
from alfish.specs.spaces import as_float32, map_space, shape_of, torch_dtype, without_vast_bounds

# Suffixes of names of metrics and evaluation results; entries of a reward must not have these names.
TAKEN = ("n", "nonfinite")


class VectorReward(spaces.Box):
    """The space of a vector reward, `[R]` float32.

    Args:
      names: names of the entries; also an attribute.

    Raises:
      UsageError: a name is empty, occurs twice, contains '/', or is in `TAKEN`.
    """

    def __init__(self, names: Sequence[str]):
        super().__init__(-np.inf, np.inf, (len(names),), np.float32)
        self.names = tuple(names)
        for name in names:
            if not name or "/" in name or name in TAKEN or self.names.count(name) > 1:
                raise UsageError(
                    f"the entries of the reward are named {list(names)}; each entry needs a unique name, without '/' "
                    f"and other than {' and '.join(TAKEN)}"
                )

    def __repr__(self) -> str:
        return f"VectorReward({', '.join(self.names)})"

    def __eq__(self, other: Any) -> bool:
        return super().__eq__(other) and reward_names(other) == self.names


def reward_spec(entries: int | Sequence[str] | None = None) -> spaces.Box:
    """Returns the spec of a reward: a scalar for None, else a vector with the given number or names of entries."""
    if entries is None:
        return spaces.Box(-np.inf, np.inf, (), np.float32)
    return VectorReward([str(entry) for entry in range(entries)] if isinstance(entries, int) else entries)


def reward_names(reward_spec: spaces.Box) -> tuple[str, ...]:
    """Returns the names of a reward's entries, or indices if there are no names; empty for a scalar."""
    return getattr(reward_spec, "names", tuple(map(str, range(sum(reward_spec.shape)))))


def observation_spec(space: spaces.Space) -> Nest:
    """Returns the spec of an observation space.

    Raises:
      UsageError: a leaf, such as Text, Graph or Sequence, is not one of `LEAF_SPACES`; the message has its path.
    """
    check_learnable(space, "observation")
    return map_space(observation_leaf, space)


def action_spec(space: spaces.Space) -> Nest:
    """Returns the canonical spec of an action space, see `alfish.specs`.

    Raises:
      UsageError: a leaf is not one of `LEAF_SPACES`; the message has its path.
    """
    check_learnable(space, "action")
    return map_space(_action_leaf, space)


def zeros(spec: Nest, leading: tuple[int, ...], device: torch.device | str = "cpu") -> Nest:
    """Returns a nest of zeros, each leaf `[*leading, *shape]`."""
    return nest.map(lambda leaf: torch.zeros((*leading, *shape_of(leaf)), dtype=torch_dtype(leaf), device=device), spec)


def sample(spec: Nest, batch_size: int, masks: Sequence[torch.Tensor | None] | None = None) -> Nest:
    """Returns uniform random actions `[B, ...]` of a canonical action spec.

    If an entry of a Box lacks a bound, it is drawn from [-1, 1], shifted if necessary to respect the other bound.

    Args:
      spec: canonical spec of the actions.
      batch_size: number of rows, B.
      masks: allowed choices of each leaf, see `MaskLayout.split`; None means all.
    """

    def draw(leaf: spaces.Space) -> torch.Tensor:
        shape = (batch_size, *shape_of(leaf))
        if isinstance(leaf, spaces.Box):
            box = without_vast_bounds(leaf)
            low, high = box.low.astype(np.float64), box.high.astype(np.float64)
            is_bounded = box.bounded_below & box.bounded_above
            start = np.where(box.bounded_below, np.maximum(low, -1), np.minimum(high, 1) - 2)
            low, high = np.where(is_bounded, low, start), np.where(is_bounded, high, start + 2)
            # Computed in float64, so that rounding does not exceed the bounds.
            return (torch.from_numpy(low) + torch.rand(shape) * torch.from_numpy(high - low)).to(torch.float32)
        if isinstance(leaf, spaces.MultiBinary):
            return torch.randint(2, shape, dtype=torch_dtype(leaf))
        count: Any = leaf.n if isinstance(leaf, spaces.Discrete) else torch.from_numpy(leaf.nvec)  # type: ignore[attr-defined]
        return (torch.rand(shape, dtype=torch.float64) * count).long()

    if masks is None:
        return nest.map(draw, spec)
    leaves, structure = nest.flatten(spec)
    return nest.unflatten(
        structure, [draw(leaf) if mask is None else uniform_action(leaf, mask) for leaf, mask in zip(leaves, masks)]
    )


def describe(spec: Nest) -> str:
    """Returns one line for messages: `camera: Box(0, 255, (84, 84, 3), uint8), speed: Discrete(3)`."""
    parts = [f"{path}: {leaf}" if path else str(leaf) for path, leaf in zip(nest.paths(spec), nest.leaves(spec))]
    return ", ".join(parts)


def observation_leaf(space: spaces.Space) -> spaces.Space:
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec)
    if not isinstance(space, spaces.Box):
        return space
    space = without_vast_bounds(space)
    if space.dtype == np.float64:
        return spaces.Box(as_float32(space.low), as_float32(space.high), dtype=np.float32)
    return space


def _action_leaf(space: spaces.Space) -> spaces.Space:
    if isinstance(space, spaces.Box):
        space = without_vast_bounds(space)
        size = int(np.prod(space.shape))
        if space.is_bounded("both"):
            return spaces.Box(-1.0, 1.0, (size,), np.float32)
        # For integers, the limit of the dtype means no bound.
        low = np.where(space.bounded_below, as_float32(space.low), -np.inf)
        high = np.where(space.bounded_above, as_float32(space.high), np.inf)
        return spaces.Box(as_float32(low.reshape(size)), as_float32(high.reshape(size)))
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec.reshape(-1))
    return spaces.MultiBinary(int(np.prod(shape_of(space))))


def leaves_in_words(whole: str, spec: Nest) -> str:
    """Returns the paths of a nest's leaves for a message; `whole` names the nest, such as 'the observation'."""
    paths = sorted(nest.paths(spec))
    return f"{whole} is a single leaf, which has no path" if paths == [""] else f"the leaves of {whole} are {paths}"
