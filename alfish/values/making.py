"""The choice of the kind of values that an algorithm learns."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gymnasium import spaces

from alfish.errors import UsageError
from alfish.parameters import FiniteFloat, UnitInterval
from alfish.parameters.parts import build
from alfish.values.scalar import Scalar
from alfish.values.vector import Vector

Discount: TypeAlias = UnitInterval | Sequence[UnitInterval]  # per environment step; a sequence: one for each entry
RewardWeights: TypeAlias = Sequence[FiniteFloat]  # of the entries of a vector reward


def values_of(
    owner: object,
    reward_spec: spaces.Box,
    gamma: Discount,
    weights: RewardWeights | None,
    *,
    has_bonus: bool = False,
    huber_delta: float | None = None,
    distribution: Callable[[float], Scalar] | None = None,
) -> Scalar:
    """Returns the kind of values that fits a reward.

    Args:
      owner: the algorithm, for messages.
      reward_spec: Box of shape () or (R,).
      gamma: one number for all entries, or one for each.
      weights: one for each entry; None: 1.
      has_bonus: whether the algorithm adds a bonus to its values.
      huber_delta: of `Scalar`.
      distribution: takes gamma; a value is a distribution of the return. None: a value is the expected return.

    Raises:
      UsageError: there is another number of discounts or of weights than of entries; a bonus would be scaled; a vector
        reward would have a distribution.
    """
    name, size = type(owner).__name__, sum(reward_spec.shape)
    gamma, weights = _without_arrays(gamma), _without_arrays(weights)
    for argument, value in (("gamma", gamma), ("reward_weights", weights)):
        if not isinstance(value, Sequence):
            continue
        if not reward_spec.shape:
            raise UsageError(f"{name}.{argument} is {value!r}, for a vector reward, and this reward is one number")
        if len(value) != size:
            raise UsageError(
                f"{name}.{argument} is {value!r}, and the reward has {size} entries; it must have one number for each"
            )
    if not reward_spec.shape:
        assert not isinstance(gamma, Sequence)
        if distribution is None:
            return Scalar(gamma, huber_delta)
        return build(distribution, Scalar, f"{name}.values", gamma)
    if distribution is not None:
        raise UsageError(
            f"{name}.values is set, and its distributions are of a reward of one number; this reward has {size} "
            "entries: leave it out, or select one entry by make_environment.rewards"
        )
    weights = [1.0] * size if weights is None else weights
    if has_bonus and size == 1 and weights[0] != 1:
        raise UsageError(
            f"{name}.reward_weights is {weights!r}, and with one entry the bonus of {name} is part of it; leave the "
            "weight out, and scale the reward by RewardScale"
        )
    return Vector(gamma if isinstance(gamma, Sequence) else [gamma] * size, weights, has_bonus, huber_delta)


def _without_arrays(value: Any) -> Any:
    """Returns an array or a tensor as a list or a number; anything else is returned as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
