"""Targets of action values, with the conventions of `returns`: lambda-returns, corrected or bounded below."""

from typing import NamedTuple

import torch

from alfish.corrections import retrace
from alfish.data import Experience
from alfish.errors import UsageError
from alfish.returns import lambda_return


class NextValues(NamedTuple):
    """Values of rows 1 to L-1, `[L-1, N]`, or `[L-1, N, R]` for vector rewards; of row 1 of `transitions`, `[1, N]`."""

    value: torch.Tensor  # of the row, under the policy in training
    q: torch.Tensor | None = None  # of the action taken at the row; None: no Retrace
    trace: torch.Tensor | None = None  # [L-1, N] min(1, pi / mu) of that action; None: no Retrace
    bonus: torch.Tensor | None = None  # [L-1, N], added to the rewards of these rows; None: nothing is added


def td_target(
    experience: Experience,
    reward: torch.Tensor,
    discount: torch.Tensor,
    following: NextValues,
    lambda_: float,
    lower_bound: bool,
) -> torch.Tensor:
    """Returns targets of action values, `[L-1, N]`: lambda-returns, or those of Retrace if there are traces.

    Args:
      experience: `[L, N]`, with `return_to_go` for a lower bound.
      reward: `[L, N]`; for vector rewards `[L, N, R]`, with targets `[L-1, N, R]`.
      discount: like `reward`, including gamma.
      following: values of rows 1 to L-1; those of `transitions` give the target of row 0 only.
      lambda_: in [0, 1].
      lower_bound: whether targets are at least `return_to_go`; see `bounded_below`.
    """
    step_type = experience.time_step.step_type
    # The return of row 0 reads the one value of `transitions` where it ends, and no other.
    value = following.value.expand(reward.shape[0] - 1, *following.value.shape[1:])
    if following.bonus is not None:
        reward = torch.cat([reward[:1], reward[1:] + following.bonus])
    if following.q is None or following.trace is None:
        target = lambda_return(reward, discount, value, step_type, lambda_)
    else:
        target = retrace(reward, discount, following.q, value, step_type, following.trace, lambda_)
    return bounded_below(target, experience.return_to_go) if lower_bound else target


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
