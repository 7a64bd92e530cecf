"""Returns and advantages: pure functions from `[T, B]` rows to `[T-1, B]`.

Action t leads to reward[t+1], discount[t+1] and the value of row t+1; the reward and discount of row 0 are not read.
`discount` is gamma times the environment's discount. On rows that are not trainable (`data.trainable`), returns are 0
and traces stop, so that values do not cross episodes. A truncated episode bootstraps from the value of its LAST row;
the discount of a terminated episode's LAST row is 0.

Rewards, values and discounts are `[T, B]`, or `[T, B, R]` for vector rewards.
"""

import torch

from alfish import nest
from alfish.data import trainable
from alfish.functional.losses import masked_mean
from alfish.processes import replicas


def discounted_return(
    reward: torch.Tensor, discount: torch.Tensor, next_value: torch.Tensor, step_type: torch.Tensor
) -> torch.Tensor:
    """Returns discounted sums of rewards, which bootstrap at the end of the episode or at the last row.

        G_t = r_{t+1} + g_{t+1} G_{t+1},   with G = v at LAST rows and at row T-1

    Args:
      reward: rewards, `[T, B]` or `[T, B, R]` float.
      discount: discounts in [0, 1], including gamma, `[T, B]` or `[T, B, R]` float.
      next_value: values v of rows 1 to T-1, `[T-1, B]` or `[T-1, B, R]` float.
      step_type: step types, `[T, B]` int32.

    Returns:
      `[T-1, B]` or `[T-1, B, R]`, 0 on rows that are not trainable.

    Raises:
      ValueError: if T < 2, or the shapes of the arguments do not fit together.
    """
    return lambda_return(reward, discount, next_value, step_type, 1.0)


def lambda_return(
    reward: torch.Tensor, discount: torch.Tensor, next_value: torch.Tensor, step_type: torch.Tensor, lambda_: float
) -> torch.Tensor:
    """Returns lambda-returns, weighted means of n-step returns.

        G_t = r_{t+1} + g_{t+1} ((1 - lambda) v_{t+1} + lambda G_{t+1}),   with G = v at LAST rows and at the last row

    With two rows, G_0 = r_1 + g_1 v_1.

    Args, returns and raises: as for `discounted_return`; also `lambda_` in [0, 1], where 0 gives the one-step return.

    Source: Sutton & Barto, 2018, ch. 12.3.
    """
    check_shapes(reward, discount, next_value, step_type, reward.shape[0] - 1)
    value = torch.cat([torch.zeros_like(next_value[:1]), next_value])  # v_0 is arbitrary: G_t = v_t + advantage_t
    trains = nest.widened(trainable(step_type), reward)
    return torch.where(trains, _advantage(reward, discount, value, trains, lambda_) + value[:-1], 0)


def gae(
    reward: torch.Tensor, discount: torch.Tensor, value: torch.Tensor, step_type: torch.Tensor, lambda_: float
) -> torch.Tensor:
    """Returns generalised advantage estimates.

        delta_t = r_{t+1} + g_{t+1} v_{t+1} - v_t
        A_t = delta_t + g_{t+1} lambda A_{t+1},   with A = 0 on rows that are not trainable

    Args, returns and raises: as for `lambda_return`, but with the values of all rows, `[T, B]` or `[T, B, R]`.

    Source: Schulman et al., 2016, eq. 16.
    """
    check_shapes(reward, discount, value, step_type, reward.shape[0])
    return _advantage(reward, discount, value, nest.widened(trainable(step_type), reward), lambda_)


def standardize(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns values `[T, B]` with mean 0 and standard deviation 1 over all learners' rows in the mask `[T, B]`."""
    mean = replicas.mean(masked_mean(values, mask), mask)
    deviation = replicas.mean(masked_mean((values - mean).square(), mask), mask).sqrt()
    return (values - mean) / (deviation + 1e-8)


def reverse_scan(decay: torch.Tensor, increment: torch.Tensor) -> torch.Tensor:
    """Returns the solution x of `x_t = increment_t + decay_t x_{t+1}` with `x_T = 0`; all tensors are `[T, ...]`.

    Doubling takes log2(T) operations on whole arrays instead of T operations on rows.
    """
    decay = decay.expand_as(increment)
    x, reach = increment, 1
    while reach < x.shape[0]:
        # After each round, x_t is the sum of its first `2 * reach` terms, and decay_t the product of as many factors.
        x = torch.cat([x[:-reach] + decay[:-reach] * x[reach:], x[-reach:]])
        decay = torch.cat([decay[:-reach] * decay[reach:], torch.zeros_like(decay[-reach:])])
        reach *= 2
    return x


def _advantage(
    reward: torch.Tensor, discount: torch.Tensor, value: torch.Tensor, trains: torch.Tensor, lambda_: float
) -> torch.Tensor:
    discount = nest.widened(discount[1:], reward)
    delta = torch.where(trains, reward[1:] + discount * value[1:] - value[:-1], 0)
    decay = torch.where(trains, discount * lambda_, 0)
    return reverse_scan(decay, delta)


def check_shapes(
    reward: torch.Tensor, discount: torch.Tensor, value: torch.Tensor, step_type: torch.Tensor, num_values: int
) -> None:
    """Raises ValueError for fewer than two rows or unequal shapes; `value` must have `num_values` rows."""
    rows = reward.shape[:2]
    if rows[0] < 2:
        raise ValueError(f"returns need at least 2 rows, got {rows[0]}")
    has_values = value.shape == (num_values, *reward.shape[1:])
    if not has_values or discount.shape not in (rows, reward.shape) or step_type.shape != rows:
        raise ValueError(
            f"shapes differ: reward {tuple(reward.shape)}, discount {tuple(discount.shape)}, "
            f"{num_values} rows of values {tuple(value.shape)}, step_type {tuple(step_type.shape)}"
        )
