"""Values of one number, and the interface of all kinds of values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from alfish import losses
from alfish.data import Experience, TimeStep
from alfish.parameters.parts import bound
from alfish.targets import NextValues, td_target


class ValueLoss(NamedTuple):
    """Losses of values, `[...]` from `[..., K]`."""

    loss: torch.Tensor
    error: torch.Tensor  # size of the TD error: a priority


class Scalar:
    """Values of one number, of a scalar reward; the interface of all kinds of values.

    Methods name the dimension of a value's numbers `K`. Here there is none, and no operation is added.

    Args:
      gamma: discount per environment step.
      huber_delta: error beyond which the loss is linear, in units of return; None: half the squared error.
    """

    num_values: int | None = None  # K; None: there is no such dimension

    def __init__(self, gamma: float, huber_delta: float | None = None):
        self.gamma: Any = gamma
        self._huber_delta = huber_delta

    def rows(self, time_step: TimeStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards and discounts, as the functions of `returns` take them."""
        return time_step.reward, self.gamma * time_step.discount

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the number that the policy maximizes, `[...]` from `[..., K]`."""
        return values

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses of all entries, `[...]` from `[..., K]`."""
        return losses

    def magnitude(self, errors: torch.Tensor) -> torch.Tensor:
        """Returns the size of TD errors, `[...]` from `[..., K]`: a priority."""
        return errors.abs()

    def least(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the values of the most pessimistic critic of each row, `[..., K]` from `[E, ..., K]`."""
        return q.amin(0)

    def average(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the mean of all critics for each row, `[..., K]` from `[E, ..., K]`."""
        return q.mean(0)

    def each(self, function: Callable[..., torch.Tensor], values: torch.Tensor, *others: Any) -> torch.Tensor:
        """Returns `function(values, *others)`, for each of the K numbers."""
        return function(values, *others)

    def of_choice(self, q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        """Returns the values `[..., K]` of choices `[...]`, from those of all choices, `[..., A, K]`."""
        return q.gather(-1, choice.unsqueeze(-1)).squeeze(-1)

    def with_bonus(self, value: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        """Returns values `[..., K]` with a bonus of the policy, `[...]`, whose weight is 1."""
        return value + bonus

    def target(
        self, experience: Experience, following: NextValues, lambda_: float, lower_bound: bool = False
    ) -> torch.Tensor:
        """Returns targets of action values, `[T', N, K]`; see `targets.td_target`."""
        return td_target(experience, *self.rows(experience.time_step), following, lambda_, lower_bound)

    def loss(self, q: torch.Tensor, target: torch.Tensor) -> ValueLoss:
        """Returns the losses of values `[..., K]`, for targets that are broadcast to them."""
        error = target - q
        loss = losses.squared(error) if self._huber_delta is None else losses.huber(error, self._huber_delta)
        return ValueLoss(self.total(loss), self.magnitude(error))

    def shown(self, q: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns numbers `[...]` of values and targets, `[..., K]`, for summaries."""
        return {"q": self.scalarized(q)}

    def sized(self, network: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the factory of a network of action values with K outputs for each."""
        return network if self.num_values is None else bound(network, type(self).__name__, num_values=self.num_values)

    def return_gamma(self, lower_bound: bool) -> float | None:
        """Returns the discount of the returns that replay stores for lower bounds; None: it stores none."""
        return self.gamma if lower_bound else None

    def check(self, owner: object, lambda_: float, one_critic: bool = False, **uses: bool) -> None:
        """Raises UsageError if values of this kind have no such returns.

        Args:
          owner: the algorithm, for messages.
          lambda_: of the returns.
          one_critic: whether values are those of one network.
          uses: what else it uses: `retrace`, `memory`, `discrete_actions`.
        """


def of_choice(q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Returns the values `[..., K]` of choices `[...]`, from those of all choices, `[..., A, K]`."""
    index = choice[..., None, None].expand(*choice.shape, 1, q.shape[-1])
    return q.gather(-2, index).squeeze(-2)


def of_least_critic(q: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Returns all numbers of the critic with the least mean, for each row: `[..., K]` from `[E, ..., K]`.

    Args:
      q: values of E critics.
      means: what the policy maximizes of them, `[E, ...]`.
    """
    critic = means.argmin(0)[None, ..., None]
    return q.gather(0, critic.expand(1, *q.shape[1:])).squeeze(0)
