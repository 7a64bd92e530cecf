"""Value representations: what a critic predicts for an action, with its target and its loss.

A value is one number (`Scalar`), one number for each entry of a vector reward (`Vector`), or a distribution of the
return (`functional.return_distributions`). All these classes have the interface of `Scalar`, so algorithms need not
know which class they use. `values_of` returns an object of the class that fits a reward.

Values, targets and advantages have one unweighted entry for each entry of the reward. The policy maximizes the weighted
sum of the entries, so values stay valid when weights change.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import gin
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from alfish.data import Experience, TimeStep
from alfish.errors import UsageError
from alfish.functional import losses
from alfish.functional.targets import NextValues, bounded_below, td_target
from alfish.parameters import FiniteFloat, UnitInterval, checked
from alfish.parameters.parts import bound, build


class ValueLoss(NamedTuple):
    """Losses `[...]` of values `[..., K]`."""

    loss: torch.Tensor
    error: torch.Tensor  # absolute TD error, for priorities


class Scalar:
    """Values of a scalar reward, one number per value; also the interface of all value representations.

    In the shapes below, K is the number of entries per value. Scalar values have no such dimension: `scalarized` and
    `total` return their argument, and `each` calls the function once.

    Args:
      gamma: discount per environment step.
      huber_delta: error beyond which the loss is linear, in units of return; None means half the squared error.
    """

    num_values: int | None = None  # size of the last dimension, K; None means that values have no such dimension
    return_gamma: float | None = None  # discount of the observed returns that targets read; None if they read none

    def __init__(self, gamma: float, huber_delta: float | None = None):
        self.gamma: Any = gamma
        self.huber_delta = huber_delta

    def reward_and_discount(self, time_step: TimeStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards and discounts for the functions in `returns`."""
        return time_step.reward, self.gamma * time_step.discount

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the number that the policy maximizes, `[...]` from `[..., K]`."""
        return values

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses of all entries, `[...]` from `[..., K]`."""
        return losses

    def magnitude(self, errors: torch.Tensor) -> torch.Tensor:
        """Returns the size of TD errors, `[...]` from `[..., K]`, for priorities."""
        return errors.abs()

    def least(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the values of the critic with the lowest estimate, per row: `[..., K]` from `[E, ..., K]`."""
        return q.amin(0)

    def average(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the mean of all critics for each row, `[..., K]` from `[E, ..., K]`."""
        return q.mean(0)

    def each(self, function: Callable[..., torch.Tensor], values: torch.Tensor, *others: Any) -> torch.Tensor:
        """Returns `function(values, *others)`, computed for each of the K numbers."""
        return function(values, *others)

    def of_choice(self, q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        """Returns the values `[..., K]` of choices `[...]`, from the values of all choices, `[..., A, K]`."""
        return q.gather(-1, choice.unsqueeze(-1)).squeeze(-1)

    def with_bonus(self, value: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        """Returns values `[..., K]` with an added bonus `[...]` of weight 1."""
        return value + bonus

    def target(self, experience: Experience, following: NextValues, lambda_: float) -> torch.Tensor:
        """Returns the targets `[L-1, N, K]` that `targets.td_target` computes.

        If `following` has the bootstrap row only, only the target of row 0 is valid.
        """
        reward, discount = self.reward_and_discount(experience.time_step)  # the discount includes gamma
        return td_target(experience, reward, discount, following, lambda_)

    def loss(self, q: torch.Tensor, target: torch.Tensor) -> ValueLoss:
        """Returns the losses of values `[..., K]`; targets are broadcast to the shape of the values."""
        error = target - q
        loss = losses.half_squared(error) if self.huber_delta is None else losses.huber(error, self.huber_delta)
        return ValueLoss(self.total(loss), self.magnitude(error))

    def shown(self, q: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns statistics `[...]` of values and targets `[..., K]` for summaries."""
        return {"q": self.scalarized(q)}

    def sized(self, network: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the given factory of a network, set to K outputs for each action value."""
        return network if self.num_values is None else bound(network, type(self).__name__, num_values=self.num_values)

    def check(self, owner: object, lambda_: float, one_critic: bool = False, **uses: bool) -> None:
        """Raises UsageError if this value representation does not support the given features.

        Args:
          owner: the algorithm, for messages.
          lambda_: mixing factor of the returns, in [0, 1].
          one_critic: whether all values come from one network.
          uses: other features that the algorithm uses: `retrace`, `memory`, `discrete_actions`.
        """


@gin.configurable(module="alfish.values", denylist=["gamma"])
@checked
class LowerBounded(Scalar):
    """Scalar values whose targets are bounded below by the observed return of the rest of the episode.

    Such targets are correct only if the environment is deterministic and entropies are not negative. For truncated
    episodes, rewards must not be negative either; see `targets.bounded_below`. Replay stores the returns.

    Args:
      gamma: discount per environment step, set by the algorithm.
    """

    def __init__(self, gamma: UnitInterval):
        super().__init__(gamma)
        self.return_gamma = gamma

    def target(self, experience: Experience, following: NextValues, lambda_: float) -> torch.Tensor:
        return bounded_below(super().target(experience, following, lambda_), experience.return_to_go)


def of_choice(q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Returns the values `[..., K]` of choices `[...]`, from the values of all choices, `[..., A, K]`."""
    index = choice[..., None, None].expand(*choice.shape, 1, q.shape[-1])
    return q.gather(-2, index).squeeze(-2)


def of_least_critic(q: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Returns the entries of the critic with the least mean, per row: `[..., K]` from `[E, ..., K]`.

    Args:
      q: values of E critics.
      means: means `[E, ...]` of the values, which the policy maximizes.
    """
    critic = means.argmin(0)[None, ..., None]
    return q.gather(0, critic.expand(1, *q.shape[1:])).squeeze(0)


class Vector(nn.Module, Scalar):
    """Values with a number for each of the R entries of a vector reward; each entry has a weight and a discount.

    An algorithm may add a bonus to rewards, such as entropy in SAC. With several entries, the bonus is an additional
    entry with weight 1, so that weights do not scale it. With one entry, the bonus is part of that entry.

    Attributes:
      weights: weight of each entry, a float32 buffer `[R]`, which checkpoints contain and workers receive. To change
        weights during a run, write to this buffer.
      scales_bonus: whether the weight of the only entry also scales the bonus.

    Args:
      gamma: discount per environment step of each entry, `[R]`. A bonus has the largest of these discounts.
      weights: initial weight of each entry, `[R]`.
      has_bonus: whether values have an entry for a bonus.
      huber_delta: error beyond which the loss is linear, in units of return, as in `Scalar`.
    """

    weights: torch.Tensor
    gamma: torch.Tensor
    num_values: int
    _endless: torch.Tensor

    def __init__(
        self,
        gamma: Sequence[float],
        weights: Sequence[float],
        has_bonus: bool = False,
        huber_delta: float | None = None,
    ):
        nn.Module.__init__(self)
        self.huber_delta = huber_delta
        self.scales_bonus = has_bonus and len(weights) == 1
        self._num_bonuses = int(has_bonus and not self.scales_bonus)
        self.num_values = len(weights) + self._num_bonuses
        gamma = [*gamma, *[max(gamma)] * self._num_bonuses]
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float32))
        self.register_buffer("gamma", torch.tensor(gamma, dtype=torch.float32), persistent=False)
        self.register_buffer("_endless", torch.zeros(self.num_values), persistent=False)

    def ignore_ends(self, entry: int) -> None:
        """Makes an entry bootstrap from the value of the LAST row even if the episode terminated.

        Call this method before training. Values of LAST rows are never trained.
        """
        self._endless[entry] = 1

    def reward_and_discount(self, time_step: TimeStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rewards and discounts, `[..., R]` each, for the functions in `returns`."""
        discount = self.gamma * torch.maximum(time_step.discount.unsqueeze(-1), self._endless)
        return self._extended(time_step.reward, 0.0), discount

    def scalarized(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of values, `[...]` from `[..., R]`."""
        return (values * self._extended(self.weights, 1.0)).sum(-1)

    def total(self, losses: torch.Tensor) -> torch.Tensor:
        """Returns the unweighted sum of the losses of all values, `[...]` from `[..., R]`."""
        return losses.sum(-1)

    def magnitude(self, errors: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of the sizes of TD errors, `[...]` from `[..., R]`, for priorities."""
        return (errors * self._extended(self.weights, 1.0)).abs().sum(-1)

    def least(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the values of the critic with the least weighted sum, per row: `[..., R]` from `[E, ..., R]`.

        Separate minima of entries would mix the values of different critics.
        """
        return of_least_critic(q, self.scalarized(q))

    def each(self, function: Callable[..., torch.Tensor], values: torch.Tensor, *others: Any) -> torch.Tensor:
        """Returns `function(entry, *others)` for each entry of values, stacked in the last dimension."""
        return torch.stack([function(entry, *others) for entry in values.unbind(-1)], -1)

    def of_choice(self, q: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        return of_choice(q, choice)

    def with_bonus(self, value: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        """Returns `[..., R]` values with a bonus `[...]` added to the last entry."""
        return value + F.pad(bonus.unsqueeze(-1), (self.num_values - 1, 0))

    def _extended(self, entries: torch.Tensor, bonus: float) -> torch.Tensor:
        """Returns `[..., R]` entries, with an additional entry for the bonus if the bonus has a separate entry."""
        return F.pad(entries, (0, 1), value=bonus) if self._num_bonuses else entries


Discount: TypeAlias = UnitInterval | Sequence[UnitInterval]  # discount per environment step, or one for each entry
RewardWeights: TypeAlias = Sequence[FiniteFloat]  # weights of the entries of a vector reward


def values_of(
    owner: object,
    reward_spec: spaces.Box,
    gamma: Discount,
    weights: RewardWeights | None,
    *,
    has_bonus: bool = False,
    huber_delta: float | None = None,
    kind: Callable[[float], Scalar] | None = None,
) -> Scalar:
    """Returns the value representation that fits a reward.

    Args:
      owner: the algorithm, for messages.
      reward_spec: spec of the reward, a Box of shape () or (R,).
      gamma: discount per environment step, one number for all entries or a number for each entry.
      weights: weight of each entry; None means 1 for all.
      has_bonus: whether the algorithm adds a bonus to its values.
      huber_delta: error beyond which the loss is linear, as in `Scalar`.
      kind: class or factory of the value representation (`Bins`, `Quantiles`, `LowerBounded`); called with gamma;
        allowed only for a scalar reward. None means expected returns.

    Raises:
      UsageError: the number of discounts or weights differs from the number of entries, a weight would scale a bonus,
        or `kind` is given for a vector reward.
    """
    name, size = type(owner).__name__, sum(reward_spec.shape)
    gamma, weights = _without_arrays(gamma), _without_arrays(weights)
    for argument, value in (("gamma", gamma), ("reward_weights", weights)):
        if not isinstance(value, Sequence):
            continue
        if not reward_spec.shape:
            raise UsageError(
                f"{name}.{argument} is {value!r}, which is for a vector reward, but the reward is a scalar"
            )
        if len(value) != size:
            raise UsageError(
                f"{name}.{argument} is {value!r}, but the reward has {size} entries; set one number per entry"
            )
    if not reward_spec.shape:
        assert not isinstance(gamma, Sequence)
        if kind is None:
            return Scalar(gamma, huber_delta)
        values = build(kind, Scalar, f"{name}.values", gamma)
        values.huber_delta = huber_delta
        return values
    if kind is not None:
        raise UsageError(
            f"{name}.values is set, but such values require a scalar reward, and the environment's reward has {size} "
            "entries; leave `values` out, or select one entry with make_environment.rewards"
        )
    weights = [1.0] * size if weights is None else weights
    if has_bonus and size == 1 and weights[0] != 1:
        raise UsageError(
            f"{name}.reward_weights is {weights!r}, but with a single entry the weight would also scale the bonus of "
            f"{name}; leave the weight out, and scale the reward with RewardScale"
        )
    return Vector(gamma if isinstance(gamma, Sequence) else [gamma] * size, weights, has_bonus, huber_delta)


def _without_arrays(value: Any) -> Any:
    """Returns a list or a number for an array or a tensor, and any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value
