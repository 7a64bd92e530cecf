"""Heads that map features to distributions over actions."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import gin
import torch
import torch.nn.functional as F
from absl import logging
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.errors import UsageError
from alfish.functional.distributions import (
    Bernoulli,
    Categorical,
    DiagonalNormal,
    Distribution,
    Joint,
    MultiCategorical,
)
from alfish.nest import Nest
from alfish.networks.layers import orthogonal
from alfish.parameters import FiniteFloat, NonNegativeFloat, PositiveInt, checked
from alfish.parameters.parts import build_network
from alfish.specs import MaskReader, is_bounded, mask_reader, missing_bounds


@gin.configurable(module="alfish.networks")
@checked
class PolicyHead(nn.Module):
    """Maps features to one distribution for each leaf of the action.

    The distributions are Categorical, MultiCategorical or Bernoulli; for Box leaves, DiagonalNormal or the distribution
    of the head `box`. The standard deviation of a normal does not depend on the observation, as in the PPO paper.

    Args:
      input_size: number of input features.
      action_spec: canonical spec of the actions, see `alfish.specs`.
      gain: gain of the final layer's orthogonal weights; with a small gain, the initial policy is almost uniform, or
        has a mean near 0.
      initial_log_std: initial log standard deviation of normals, in the algorithm's units (half the width of a bounded
        Box is 1).
      min_log_std: smooth lower bound of the normals' log standard deviation; None means no bound.
      learn_std: whether the normals' standard deviation is learned.
      box: class or factory of the head of a Box leaf (`@BetaHead`); called with input_size and the leaf. None means a
        normal with the settings above, a `NormalHead`.
    """

    def __init__(
        self,
        input_size: PositiveInt,
        action_spec: Nest,
        gain: NonNegativeFloat = 0.01,
        initial_log_std: FiniteFloat = 0.0,
        min_log_std: FiniteFloat | None = None,
        learn_std: bool = True,
        box: Callable[[int, spaces.Box], nn.Module] | None = None,
    ):
        super().__init__()
        if box is None:
            box = functools.partial(
                NormalHead, gain=gain, initial_log_std=initial_log_std, min_log_std=min_log_std, learn_std=learn_std
            )
        self._structure = nest.map(lambda _: 0, action_spec)
        heads: list[nn.Module] = []
        for path, leaf in nest.named_leaves(action_spec, "action"):
            if not is_bounded(leaf):
                logging.warning(
                    "The %s has %s (%s), so it is not scaled: PolicyHead.initial_log_std is in the environment's units",
                    path,
                    missing_bounds(leaf),
                    leaf,
                )
            if isinstance(leaf, spaces.Box):
                heads.append(build_network(box, "PolicyHead.box", input_size, leaf, has=()))
            elif isinstance(leaf, spaces.Discrete):
                heads.append(_LogitsHead(input_size, [int(leaf.n)], gain, "categorical"))
            elif isinstance(leaf, spaces.MultiDiscrete):
                heads.append(_LogitsHead(input_size, [int(n) for n in leaf.nvec], gain, "multi_categorical"))
            else:
                heads.append(_LogitsHead(input_size, [leaf.shape[0]], gain, "bernoulli"))
        self.heads = nn.ModuleList(heads)
        self._is_bare = isinstance(action_spec, spaces.Space)

    def forward(self, features: torch.Tensor, masks: Sequence[torch.Tensor | None] | None = None) -> Distribution:
        """Returns the distributions of the action at each row.

        Args:
          features: features of the rows, `[..., input_size]`.
          masks: allowed choices of each leaf (`specs.MaskReader`); None means that all are allowed.
        """
        if masks is None and self._is_bare:
            return self.heads[0](features)
        if masks is None:
            remaining = iter(self.heads)
            return Joint(nest.map(lambda _: next(remaining)(features), self._structure))
        parts = iter(
            [head(features) if mask is None else head(features, mask) for head, mask in zip(self.heads, masks)]
        )
        return next(parts) if self._is_bare else Joint(nest.map(lambda _: next(parts), self._structure))


def head_masks(head: nn.Module, observation_spec: Nest, action_spec: Nest) -> MaskReader | None:
    """Returns the reader of masks for a policy head; None if the observation has no mask.

    Raises:
      UsageError: the head takes no masks.
    """
    reader = mask_reader(observation_spec, action_spec)
    if reader is not None and len(inspect.signature(head.forward).parameters) < 2:
        raise UsageError(
            f"the observation has an action mask, but {type(head).__name__}.forward takes features only; add a second "
            "argument, the mask of each leaf, as in PolicyHead"
        )
    return reader


def policy_of(head: Any, features: torch.Tensor, masks: MaskReader | None, observation: Nest) -> Distribution:
    """Returns a policy head's distribution at features `[..., input_size]`.

    Args:
      head: a policy head.
      features: input of the head.
      masks: reader of the head's masks, from `head_masks`; None means that all actions are allowed.
      observation: observation `[..., *shape]`, from which the masks are read.
    """
    return head(features) if masks is None else head(features, masks(observation))


# For recorded data: without a lower bound on std the likelihood of constant actions is unbounded.
FLOORED_HEAD = functools.partial(PolicyHead, min_log_std=-5.0)


class _LogitsHead(nn.Module):
    def __init__(self, input_size: int, sizes: list[int], gain: float, kind: str):
        super().__init__()
        self._sizes, self._kind = sizes, kind
        self.linear = orthogonal(nn.Linear(input_size, sum(sizes)), gain)

    def forward(self, features: torch.Tensor, mask: torch.Tensor | None = None) -> Distribution:
        logits = self.linear(features)
        if self._kind == "categorical":
            return Categorical.of(logits, mask)
        if self._kind == "bernoulli":
            return Bernoulli.of(logits, None if mask is None else mask.unflatten(-1, (-1, 2)))
        parts = logits.split(self._sizes, -1)
        masks = [None] * len(parts) if mask is None else mask.split(self._sizes, -1)
        return MultiCategorical(tuple(map(Categorical.of, parts, masks)))


@gin.configurable(module="alfish.networks")
@checked
class NormalHead(nn.Module):
    """A normal whose standard deviation does not depend on the observation.

    Args:
      input_size: number of input features.
      space: space of a Box leaf of the action.
      gain: gain of the orthogonal weights; a small gain gives the first policy a mean near 0.
      initial_log_std: initial log standard deviation, in the algorithm's units.
      min_log_std: smooth lower bound of the log standard deviation; None means no bound.
      learn_std: whether the standard deviation is learned.
    """

    def __init__(
        self,
        input_size: PositiveInt,
        space: spaces.Box,
        gain: NonNegativeFloat = 0.01,
        initial_log_std: FiniteFloat = 0.0,
        min_log_std: FiniteFloat | None = None,
        learn_std: bool = True,
    ):
        super().__init__()
        self.linear = orthogonal(nn.Linear(input_size, space.shape[0]), gain)
        self.log_std = nn.Parameter(torch.full(space.shape, float(initial_log_std)), learn_std)
        self._min_log_std = min_log_std

    def mean(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the mean `[..., A]`."""
        return self.linear(features)

    def forward(self, features: torch.Tensor) -> DiagonalNormal:
        mean = self.mean(features)
        log_std: torch.Tensor = self.log_std
        if self._min_log_std is not None:  # log of the sum of the minimum and the learned standard deviation
            log_std = self._min_log_std + F.softplus(log_std - self._min_log_std)
        return DiagonalNormal(mean, log_std.expand_as(mean))
