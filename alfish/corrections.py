"""V-trace: returns of one policy from rows of another policy, with the conventions of `returns`."""

from typing import NamedTuple

import torch

from alfish import nest
from alfish.data import trainable
from alfish.returns import check_shapes, reverse_scan


class VTrace(NamedTuple):
    """Targets and advantages `[T-1, B]` or `[T-1, B, R]`, 0 on rows that do not train."""

    target: torch.Tensor  # vs, of the value
    advantage: torch.Tensor  # q - V, for a policy loss that includes the ratio


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
        A_t = delta_t + g_{t+1} lambda c_t A_{t+1},   with A = 0 on rows that do not train
        vs_t = V_t + A_t
        q_t = r_{t+1} + g_{t+1} (V_{t+1} + lambda A_{t+1})

    The advantage q - V has no factor rho_t, because the policy loss includes the ratio. At ratio 1 the advantage is
    `returns.gae`, and vs is `returns.lambda_return`.

    Args and raises: as `returns.gae`, and
      ratio: `[T, B]`, pi / mu of the action at row t. Read on rows that train.
      rho_bar: upper limit of the weight of a step's own error. Where it clips, targets lead to the value of a policy
        between pi and mu, proportional to min(rho_bar mu, pi).
      c_bar: upper limit of the weight of later errors; it sets the speed of convergence.

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
