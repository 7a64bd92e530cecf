"""Losses per row: pure functions that keep the shape of their arguments. The learner masks and averages."""

import torch

from alfish import nest


def clipped_surrogate(log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantage: torch.Tensor, clip_range):
    """PPO's pessimistic policy loss.

        r = exp(log_prob - old_log_prob),   loss = -min(r A, clip(r, 1 - clip_range, 1 + clip_range) A)

    Args:
      log_prob: `[...]` of the taken action under the policy in training; the only argument that needs a gradient.
      old_log_prob: `[...]` under the policy that took it.
      advantage: `[...]`.
      clip_range: positive float or 0-d tensor.

    Returns:
      loss `[...]` and the ratio r `[...]`.

    Source: Schulman et al., 2017, eq. 7.
    """
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantage, clipped * advantage), ratio


def clipped_value_loss(value: torch.Tensor, old_value: torch.Tensor, target: torch.Tensor, clip_range):
    """Half the squared error, the larger of the plain one and of one whose value moved at most `clip_range`.

    Args:
      value: `[...]` in training.
      old_value: `[...]` at rollout.
      target: `[...]` the return to regress to.
      clip_range: positive float or 0-d tensor, in units of reward.

    Source: OpenAI baselines' ppo2; Engstrom et al., 2020, section 3.
    """
    clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((value - target).square(), (clipped - target).square())


def squared(error: torch.Tensor) -> torch.Tensor:
    """`0.5 error^2`."""
    return 0.5 * error.square()


def huber(error: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    """Quadratic within `delta` (in units of the error), linear outside, with a continuous slope."""
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))


def expectile(error: torch.Tensor, share: float) -> torch.Tensor:
    """Half a squared error, weighted by `share` where it is positive and by 1 - `share` where it is not.

    The value that minimises its mean over targets, of errors target - value, is their expectile: at 0.5 their mean,
    towards 1 their maximum.

    Args:
      error: `[...]`.
      share: in (0, 1).

    Source: Kostrikov et al., 2022, eq. 3, https://arxiv.org/abs/2110.06169.
    """
    return torch.where(error > 0, share, 1 - share) * squared(error)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the rows where `mask` is true; 0 where none is. `values` `[T, N, ...]`, `mask` `[T, N]` bool."""
    mask = nest.widened(mask, values)
    # where, not a product: a masked row may hold inf or nan.
    return torch.where(mask, values, 0).sum() / (mask.expand_as(values).sum().clamp(min=1))
