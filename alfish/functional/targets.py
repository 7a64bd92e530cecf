"""Targets of action values, with the conventions of `returns`: lambda-returns, Retrace, and lower bounds."""

from typing import NamedTuple

import torch

from alfish.data import Experience
from alfish.errors import UsageError
from alfish.functional.corrections import retrace
from alfish.functional.returns import lambda_return


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
