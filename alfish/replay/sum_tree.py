"""Numbers that are drawn in proportion to their weights, and whose weights change."""

import itertools

import numpy as np
import torch

FAN_OUT = 16  # children of a sum, in two cache lines
MAX_TOP_SIZE = 4096  # sums that are gone through one by one; above more, there are sums of these


class SumTree:
    """Weights, sums of each 16 of them, sums of each 16 of those, and so on to a level that is short.

    A sum is always made anew of its children, never changed by a difference, so it does not drift, and is the same
    whatever was set before. A wide tree has few levels, and each of them is a few operations on whole arrays.

    Args:
      size: how many weights; all are 0 at first.
    """

    def __init__(self, size: int):
        self._size = size
        self._levels = [_zeros(size)]  # float64, the weights first, filled up with zeros to whole families
        while len(self._levels[-1]) > MAX_TOP_SIZE:
            self._levels.append(_zeros(len(self._levels[-1]) // FAN_OUT))
        self._families = [level.reshape(-1, FAN_OUT) for level in self._levels]  # views

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._levels[-1].sum())

    def weights(self, index: np.ndarray) -> np.ndarray:
        """`[N]` float64, of these numbers (`[N]` int64)."""
        return self._levels[0].take(index)

    def set(self, index: np.ndarray, weight: np.ndarray) -> None:
        """Sets the weights of some numbers. Where one comes twice, its last weight counts.

        Args:
          index: `[N]` int64 in [0, size).
          weight: `[N]` float64, finite, and 0 or no less than 1e-300.
        """
        self._levels[0][index] = weight
        for families, sums in zip(self._families, self._levels[1:]):
            index = index // FAN_OUT
            if len(index) < len(families):
                sums[index] = families.take(index, axis=0).sum(axis=1)
            else:
                sums[: len(families)] = families.sum(axis=1)

    def find(self, fraction: np.ndarray) -> np.ndarray:
        """The numbers at which the running sum of weights first exceeds these fractions of the total.

        For uniform fractions, a number comes as often as its share of the total, and never where its weight is 0.

        Args:
          fraction: `[N]` float64 in [0, 1).

        Returns:
          `[N]` int64. The total must be positive.
        """
        reached = _running_sum(self._levels[-1])
        point = fraction * reached[-1]  # less than the total, however it is rounded
        index = np.searchsorted(reached, point, side="right")
        rest = point - reached[index] + self._levels[-1][index]
        for families in reversed(self._families[:-1]):
            family = families.take(index, axis=0)
            reached = _running_sum(family)  # [N, FAN_OUT]
            # A point that rounding has put beside its family goes to the family's edge: the sum that its parent has
            # was made in another order.
            point = np.minimum(np.maximum(rest, 0), np.nextafter(reached[:, -1], 0))
            # The first child beyond the point: the running sum steps over it there, so its weight is positive.
            child = (reached > point[:, None]).argmax(axis=1)
            at = np.arange(0, family.size, FAN_OUT) + child
            rest = point - reached.take(at) + family.take(at)
            index = index * FAN_OUT + child
        return index

    def check_valid(self) -> None:
        """Raises AssertionError where a sum is not that of its children, to the last bit."""
        assert np.isfinite(self._levels[0]).all() and (self._levels[0] >= 0).all()
        assert not self._levels[0][self._size :].any(), "a weight behind the last one"
        for families, sums in itertools.zip_longest(self._families, self._levels[1:]):
            if sums is not None:
                assert np.array_equal(families.sum(axis=1), sums[: len(families)]), "a sum is out of date"
                assert not sums[len(families) :].any()


def _zeros(size: int) -> np.ndarray:
    return np.zeros(-(-size // FAN_OUT) * FAN_OUT)


def _running_sum(weight: np.ndarray) -> np.ndarray:
    """Along the last axis. torch keeps the sum in a register, and takes a third of numpy's time."""
    return torch.from_numpy(weight).cumsum(-1).numpy()
