"""Losses for each row, in the shape of the arguments. The learner masks and averages losses.

The last functions are losses that keep policies and values close to the policies and values of the rollout.
"""

from typing import Any

import torch

from alfish import nest


def half_squared(error: torch.Tensor) -> torch.Tensor:
    """Returns `0.5 error^2`."""
    return 0.5 * error.square()


def huber(error: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    """Returns `0.5 error^2` for errors within `delta`, and a linear loss beyond, with a continuous slope."""
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the mean of `[T, N, ...]` values over the rows of a `[T, N]` bool mask; 0 for an empty mask."""
    mask = nest.widened(mask, values)
    # torch.where instead of a product with the mask, because a masked row may hold inf or nan.
    return torch.where(mask, values, 0).sum() / (mask.expand_as(values).sum().clamp(min=1))


def clipped_surrogate(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    lowest: Any,
    highest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns PPO's policy loss and the probability ratio, both `[...]`.

        r = exp(log_prob - old_log_prob),   loss = -min(r A, clip(r, lowest, highest) A)

    Args:
      log_prob: log-probability `[...]` of the action under the policy in training; the only argument that needs a
        gradient.
      old_log_prob: log-probability `[...]` under the policy that drew the action.
      advantage: advantage `[...]` of the action.
      lowest, highest: limits of the ratio, below and above 1, as floats or 0-d tensors.

    Source: Schulman et al., 2017, eq. 7.
    """
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(lowest, highest)
    return -torch.minimum(ratio * advantage, clipped * advantage), ratio


def clipped_value_loss(
    value: torch.Tensor, old_value: torch.Tensor, target: torch.Tensor, clip_range: Any
) -> torch.Tensor:
    """Returns half the larger of two squared errors: of `value`, and of `value` clipped to `old_value` +- `clip_range`.

    Args:
      value: current value `[...]`, with gradient.
      old_value: value `[...]` at the time when the target was computed.
      target: target `[...]` of the value.
      clip_range: largest change of the value that lowers the loss, a positive float or 0-d tensor, in units of return.

    Source: OpenAI baselines' ppo2; Engstrom et al., 2020, section 3.
    """
    clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((value - target).square(), (clipped - target).square())
