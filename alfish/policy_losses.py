"""Losses of policies and values that stay close to those of the rollout, one for each row."""

from typing import Any

import torch


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
      log_prob: `[...]` of the action under the policy in training; the only argument that needs a gradient.
      old_log_prob: `[...]` under the policy that drew the action.
      advantage: `[...]`.
      lowest, highest: floats or 0-d tensors, the ratio's range, around 1.

    Source: Schulman et al., 2017, eq. 7.
    """
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(lowest, highest)
    return -torch.minimum(ratio * advantage, clipped * advantage), ratio


def clipped_value_loss(
    value: torch.Tensor, old_value: torch.Tensor, target: torch.Tensor, clip_range: Any
) -> torch.Tensor:
    """Returns half the maximum of two squared errors: of `value`, and of `value` within `clip_range` of `old_value`.

    Args:
      value: `[...]` in training.
      old_value: `[...]` when the target was computed.
      target: `[...]`.
      clip_range: positive float or 0-d tensor, in units of return.

    Source: OpenAI baselines' ppo2; Engstrom et al., 2020, section 3.
    """
    clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((value - target).square(), (clipped - target).square())
