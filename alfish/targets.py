"""Targets of action values, with the conventions of `returns`: lambda-returns, Retrace, lower bounds."""

from typing import NamedTuple

import torch

from alfish import nest
from alfish.data import Experience, trainable
from alfish.errors import UsageError
from alfish.returns import check_shapes, lambda_return, reverse_scan


class NextValues(NamedTuple):
    """Values of rows 1 to L-1, all `[L-1, N]`."""

    value: torch.Tensor  # of the row, under the policy in training
    q: torch.Tensor | None = None  # of the action taken at the row; None: no Retrace
    trace: torch.Tensor | None = None  # min(1, pi / mu) of that action; None: no Retrace


def td_target(
    experience: Experience, gamma: float, lambda_: float, following: NextValues, lower_bound: bool
) -> torch.Tensor:
    """Returns targets of action values, `[L-1, N]`: lambda-returns, or those of Retrace if there are traces.

    Args:
      experience: `[L, N]`, with `return_to_go` for a lower bound.
      gamma: discount per environment step.
      lambda_: in [0, 1].
      following: values of rows 1 to L-1.
      lower_bound: whether targets are at least `return_to_go`; see `bounded_below`.
    """
    step = experience.time_step
    rows = step.reward, gamma * step.discount
    if following.q is None or following.trace is None:
        target = lambda_return(*rows, following.value, step.step_type, lambda_)
    else:
        target = retrace(*rows, following.q, following.value, step.step_type, following.trace, lambda_)
    return bounded_below(target, experience.return_to_go) if lower_bound else target


def retrace(
    reward: torch.Tensor,
    discount: torch.Tensor,
    next_q: torch.Tensor,
    next_value: torch.Tensor,
    step_type: torch.Tensor,
    next_trace: torch.Tensor,
    lambda_: float,
) -> torch.Tensor:
    """Returns targets of the action values of a policy pi, from rows of a policy mu.

        G_t = r_{t+1} + g_{t+1} (V_{t+1} + lambda c_{t+1} (G_{t+1} - Q_{t+1})),   without the last term where row t+1
                                                                                 does not train

    With c = min(1, pi / mu) the targets lead to the values of pi for every mu. Any c in [0, pi / mu] is correct; c = 0
    is the one-step return. With c = 1 and Q = V the targets are `returns.lambda_return`.

    Args and raises: as `returns.lambda_return`, and
      next_q: like `next_value`, of the actions at rows 1 to T-1. Read on rows that train.
      next_value: of rows 1 to T-1 under pi: the mean of its action values.
      next_trace: `[T-1, B]` in [0, 1], c of the actions at rows 1 to T-1. Read on rows that train.

    Source: Munos et al., 2016, eq. 4, https://arxiv.org/abs/1606.02647.
    """
    check_shapes(reward, discount, next_value, step_type, reward.shape[0] - 1)
    if next_q.shape != next_value.shape or next_trace.shape != step_type[1:].shape:
        raise ValueError(
            f"shapes differ: next_q {tuple(next_q.shape)}, next_value {tuple(next_value.shape)}, next_trace "
            f"{tuple(next_trace.shape)}, step_type {tuple(step_type.shape)}"
        )
    valid = nest.widened(trainable(step_type), reward)
    one_step = torch.where(valid, reward[1:] + nest.widened(discount[1:], reward) * next_value, 0)
    decay = torch.where(valid, nest.widened(discount[1:], reward) * lambda_, 0)
    # Of rows 1 to T-2: c_t (G_t - Q_t).
    trace = torch.where(valid[1:], nest.widened(next_trace[:-1], reward), 0)
    correction = reverse_scan(trace * decay[1:], trace * torch.where(valid[1:], one_step[1:] - next_q[:-1], 0))
    return one_step + decay * torch.cat([correction, torch.zeros_like(one_step[:1])])


def behaviour_trace(experience: Experience, log_pi: torch.Tensor) -> torch.Tensor:
    """Returns Retrace's c = min(1, pi / mu) of the actions at rows 1 to L-1, `[L-1, N]`.

    It is 0 where mu is unknown: `log_prob` is nan, or the action is not the one that the policy drew.

    Args:
      experience: `[L, N]`, with the rollout's `action` and `log_prob` as info.
      log_pi: `[L-1, N]`, log-probability of the actions under the policy in training.

    Raises:
      UsageError: there is no info, as in recorded data.
    """
    if experience.info is None:
        raise UsageError(
            "retrace needs the probability of each action when it was drawn, and recorded data have none; set retrace "
            "to False"
        )
    rows = experience.action, experience.info["action"], experience.info["log_prob"]
    action, sample, log_mu = nest.at(rows, slice(1, None))
    known = ~log_mu.isnan()
    for leaf, own in zip(nest.leaves(action), nest.leaves(sample)):
        known = known & (leaf == own if leaf.ndim == known.ndim else (leaf == own).all(-1))
    return torch.where(known, (log_pi - log_mu).exp().clamp(max=1), 0)


def bounded_below(target: torch.Tensor, return_to_go: torch.Tensor | None) -> torch.Tensor:
    """Returns max(target, return), `[T-1, B]`; the target where the return is unknown.

    In a deterministic environment an observed return is a lower bound of the optimal value. It carries rewards back
    over a whole episode in one update. The return of a truncated episode lacks later rewards; it is a lower bound only
    if rewards are not negative.

    Args:
      target: `[T-1, B]` float.
      return_to_go: `[T, B]` float, nan where it is unknown; the last row is not read.

    Raises:
      UsageError: `return_to_go` is None.

    Source: He et al., 2017, eq. 5, https://arxiv.org/abs/1611.01606, as a target in place of a penalty.
    """
    if return_to_go is None:
        raise UsageError(
            "lower_bound needs the returns of whole episodes (Experience.return_to_go), and these batches have none; "
            "train from replay with returns, or set lower_bound to False"
        )
    return torch.where(return_to_go[:-1] > target, return_to_go[:-1], target)  # nan is not greater
