"""Targets of values, with the conventions of `returns`.

`td_target` computes the targets of action values from windows of replay. `retrace` and `vtrace` are returns for one
policy from rows of another policy.
"""

from typing import NamedTuple

import torch

from alfish import nest
from alfish.data import Experience, trainable
from alfish.errors import UsageError
from alfish.functional.returns import check_shapes, lambda_return, reverse_scan


class NextValues(NamedTuple):
    """Values of rows 1 to L-1, `[L-1, N]`, or of the bootstrap row only, `[1, N]`; `[..., R]` for vector rewards.

    The bootstrap row is the row at which the return of row 0 ends, see `networks.first_and_bootstrap_rows`.
    """

    value: torch.Tensor  # value of the row under the policy in training
    q: torch.Tensor | None = None  # value of the taken action; None without Retrace
    trace: torch.Tensor | None = None  # [L-1, N] min(1, pi / mu) of the taken action; None without Retrace
    bonus: torch.Tensor | None = None  # [L-1, N] bonus added to the rewards of rows 1 to L-1; None means no bonus


def td_target(
    experience: Experience,
    reward: torch.Tensor,
    discount: torch.Tensor,
    following: NextValues,
    lambda_: float,
) -> torch.Tensor:
    """Returns targets of action values, `[L-1, N]`: lambda-returns, or Retrace's returns if there are traces.

    Args:
      experience: rows `[L, N]`.
      reward: rewards `[L, N]`; for vector rewards `[L, N, R]`, with targets `[L-1, N, R]`.
      discount: discounts with the shape of `reward`, including gamma.
      following: values of rows 1 to L-1, or of the bootstrap row only; then only the target of row 0 is valid.
      lambda_: mixing factor of the return, in [0, 1].
    """
    step_type = experience.time_step.step_type
    # The value of the bootstrap row may replace the values of all rows. With lambda 0, the return of row 0 reads only
    # the value of row 1, which is the bootstrap row. With lambda 1, the value of a row in between cancels out: the
    # previous row's error adds the value, and the row's own error subtracts it.
    value = following.value.expand(reward.shape[0] - 1, *following.value.shape[1:])
    if following.bonus is not None:
        reward = torch.cat([reward[:1], reward[1:] + following.bonus])
    if following.q is None or following.trace is None:
        return lambda_return(reward, discount, value, step_type, lambda_)
    return retrace(reward, discount, following.q, value, step_type, following.trace, lambda_)


def bounded_below(target: torch.Tensor, return_to_go: torch.Tensor | None) -> torch.Tensor:
    """Returns max(target, return), `[T-1, B]`, or the target where the return is unknown.

    In a deterministic environment, an observed return is a lower bound of the optimal value. The bound propagates
    rewards through a whole episode in one update. The return of a truncated episode lacks later rewards, so it is a
    lower bound only if rewards are not negative.

    Args:
      target: targets, `[T-1, B]` float.
      return_to_go: observed returns, `[T, B]` float, nan where unknown; the last row is not read.

    Raises:
      UsageError: `return_to_go` is None.

    Source: He et al., 2017, eq. 5, https://arxiv.org/abs/1611.01606, but with the bound in the target, not a penalty.
    """
    if return_to_go is None:
        raise UsageError(
            "LowerBounded needs the returns of whole episodes (Experience.return_to_go), but these batches have no "
            "returns; train from replay with returns, or leave out `values`"
        )
    return torch.where(return_to_go[:-1] > target, return_to_go[:-1], target)  # a comparison with nan is False


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

        G_t = r_{t+1} + g_{t+1} (V_{t+1} + lambda c_{t+1} (G_{t+1} - Q_{t+1}))

    Where row t+1 is not trainable, the term with lambda is left out.

    With c = min(1, pi / mu), the targets estimate the values of pi for every mu. Any c in [0, pi / mu] is correct; c =
    0 gives the one-step return. With c = 1 and Q = V the targets equal `returns.lambda_return`.

    Args and raises: as for `returns.lambda_return`, and
      next_q: values Q of the actions taken at rows 1 to T-1, with the shape of `next_value`; read only on trainable
        rows.
      next_value: values V of rows 1 to T-1: the means of action values under pi.
      next_trace: weights c of the actions taken at rows 1 to T-1, `[T-1, B]` in [0, 1]; read only on trainable rows.

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
    # c_t (G_t - Q_t) for rows 1 to T-2.
    trace = torch.where(valid[1:], nest.widened(next_trace[:-1], reward), 0)
    correction = reverse_scan(trace * decay[1:], trace * torch.where(valid[1:], one_step[1:] - next_q[:-1], 0))
    return one_step + decay * torch.cat([correction, torch.zeros_like(one_step[:1])])


def behaviour_trace(experience: Experience, log_pi: torch.Tensor) -> torch.Tensor:
    """Returns Retrace's weights c = min(1, pi / mu) of the actions at rows 1 to L-1, `[L-1, N]`.

    The weight is 0 where mu is unknown, because `log_prob` is nan or the policy did not draw the action.

    Args:
      experience: rows `[L, N]`, whose info has the rollout's `action` and `log_prob`.
      log_pi: log-probability `[L-1, N]` of the actions under the policy in training.

    Raises:
      UsageError: the rows have no info, as in recorded data.
    """
    if experience.info is None:
        raise UsageError(
            "Retrace needs the probability with which each action was drawn, but recorded data lack it; use an "
            "algorithm without Retrace"
        )
    rows = experience.action, experience.info["action"], experience.info["log_prob"]
    action, sample, log_mu = nest.at(rows, slice(1, None))
    known = ~log_mu.isnan()
    for leaf, own in zip(nest.leaves(action), nest.leaves(sample)):
        known = known & (leaf == own if leaf.ndim == known.ndim else (leaf == own).all(-1))
    return torch.where(known, (log_pi - log_mu).exp().clamp(max=1), 0)


class VTrace(NamedTuple):
    """Targets and advantages `[T-1, B]` or `[T-1, B, R]`, 0 on rows that are not trainable."""

    target: torch.Tensor  # targets v_s of the value
    advantage: torch.Tensor  # advantages q - V, for a policy loss with the ratio as a factor


def vtrace(
    reward: torch.Tensor,
    discount: torch.Tensor,
    value: torch.Tensor,
    step_type: torch.Tensor,
    ratio: torch.Tensor,
    lambda_: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """Returns value targets and advantages of a policy pi, from rows of a policy mu.

        rho_t = min(rho_bar, ratio_t),   c_t = min(c_bar, ratio_t)
        delta_t = rho_t (r_{t+1} + g_{t+1} V_{t+1} - V_t)
        A_t = delta_t + g_{t+1} lambda c_t A_{t+1},   with A = 0 on rows that are not trainable
        vs_t = V_t + A_t
        q_t = r_{t+1} + g_{t+1} (V_{t+1} + lambda A_{t+1})

    The advantage q - V has no factor rho_t, because the policy loss contains the ratio. With ratios of 1, the advantage
    equals `returns.gae`, and vs equals `returns.lambda_return`.

    Args and raises: as for `returns.gae`, and
      ratio: pi / mu of the action at each row, `[T, B]`; read only on trainable rows.
      rho_bar: upper limit of the weight of each step's TD error. If it clips ratios, targets estimate the value of a
        policy between pi and mu, proportional to min(rho_bar mu, pi).
      c_bar: upper limit of the weight of later TD errors; it affects only the speed of convergence.

    Source: Espeholt et al., 2018, section 4.1; lambda as in its remark 2.
    """
    check_shapes(reward, discount, value, step_type, reward.shape[0])
    if ratio.shape != step_type.shape:
        raise ValueError(f"shapes differ: ratio {tuple(ratio.shape)}, step_type {tuple(step_type.shape)}")
    discount, ratio = nest.widened(discount[1:], reward), nest.widened(ratio[:-1], reward)
    valid = nest.widened(trainable(step_type), reward)
    td_error = torch.where(valid, reward[1:] + discount * value[1:] - value[:-1], 0)
    decay = torch.where(valid, discount * lambda_, 0)
    ratio = torch.where(valid, ratio, 0)
    correction = reverse_scan(decay * ratio.clamp(max=c_bar), td_error * ratio.clamp(max=rho_bar))
    following = torch.cat([correction[1:], torch.zeros_like(correction[:1])])
    return VTrace(torch.where(valid, correction + value[:-1], 0), td_error + decay * following)
