"""Draws indices with probabilities proportional to weights that change."""

import itertools

import numpy as np
import torch

FAN_OUT = 16  # number of children of a node: two cache lines
MAX_TOP_SIZE = 4096  # largest number of nodes in the top level, which is searched as a whole


class SumTree:
    """Tree of sums over weights: each node is the sum of 16 nodes of the level below.

    A sum is always computed from its children, not updated by a difference, so it does not drift or depend on earlier
    weights. A wide tree has few levels; each level takes a few operations on whole arrays.

    Args:
      size: number of weights, which are initially 0.
    """

    def __init__(self, size: int):
        self._size = size
        self._levels = [_zeros(size)]  # float64, weights first, padded with zeros to whole families
        while len(self._levels[-1]) > MAX_TOP_SIZE:
            self._levels.append(_zeros(len(self._levels[-1]) // FAN_OUT))
        self._families = [level.reshape(-1, FAN_OUT) for level in self._levels]  # views, one row per parent node

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._levels[-1].sum())

    def weights(self, index: np.ndarray) -> np.ndarray:
        """Returns the weights of `index` (`[N]` int64), `[N]` float64."""
        return self._levels[0].take(index)

    def set(self, index: np.ndarray, weight: np.ndarray) -> None:
        """Sets the weights at some indices; the last weight counts if an index is repeated.

        Args:
          index: indices `[N]`, int64 in [0, size).
          weight: weights `[N]`, float64, finite, and 0 or at least 1e-300.
        """
        self._levels[0][index] = weight
        for families, sums in zip(self._families, self._levels[1:]):
            index = index // FAN_OUT
            if len(index) < len(families):
                sums[index] = families.take(index, axis=0).sum(axis=1)
            else:
                sums[: len(families)] = families.sum(axis=1)

    def find(self, fraction: np.ndarray) -> np.ndarray:
        """Returns, for each fraction of the total, the first index at which the running sum of weights exceeds it.

        With uniform fractions, the probability of an index is its weight divided by the total. An index of weight 0 is
        never returned.

        Args:
          fraction: fractions `[N]` of the total weight, float64 in [0, 1).

        Returns:
          Indices `[N]`, int64. The total must be positive.
        """
        reached = _running_sum(self._levels[-1])
        point = fraction * reached[-1]  # less than the total, even after rounding
        index = np.searchsorted(reached, point, side="right")
        rest = point - reached[index] + self._levels[-1][index]
        for families in reversed(self._families[:-1]):
            family = families.take(index, axis=0)
            reached = _running_sum(family)  # [N, FAN_OUT]
            # The parent's sum was computed in a different order, so rounding may move a point out of its family. Clip
            # it to the family's range.
            point = np.minimum(np.maximum(rest, 0), np.nextafter(reached[:, -1], 0))
            # The first child whose running sum exceeds the point has a positive weight, because the sum increases
            # there.
            child = (reached > point[:, None]).argmax(axis=1)
            at = np.arange(0, family.size, FAN_OUT) + child
            rest = point - reached.take(at) + family.take(at)
            index = index * FAN_OUT + child
        return index

    def check_valid(self) -> None:
        """Raises AssertionError if a sum is not exactly the sum of its children."""
        assert np.isfinite(self._levels[0]).all() and (self._levels[0] >= 0).all()
        assert not self._levels[0][self._size :].any(), "there is a weight beyond the last index"
        for families, sums in itertools.zip_longest(self._families, self._levels[1:]):
            if sums is not None:
                assert np.array_equal(families.sum(axis=1), sums[: len(families)]), "a sum is outdated"
                assert not sums[len(families) :].any()


def _zeros(size: int) -> np.ndarray:
    return np.zeros(-(-size // FAN_OUT) * FAN_OUT)


def _running_sum(weight: np.ndarray) -> np.ndarray:
    """Returns the running sum along the last axis. torch takes a third of numpy's time."""
    return torch.from_numpy(weight).cumsum(-1).numpy()
