"""Sampling of windows by priority, and the tree of sums that finds a window in proportion to its priority."""

import itertools

import gin
import numpy as np
import torch

from alfish.errors import UsageError
from alfish.parameters import PositiveFloat, UnitInterval, checked
from alfish.parameters.measured import schedule_of_progress
from alfish.parameters.schedules import Schedule
from alfish.processes import replicas
from alfish.replay.ring_buffer import RingBuffer, no_window
from alfish.replay.row_store import copy_entries
from alfish.replay.samplers import Sampler, check_held
from alfish.replay.start_index import SequenceIndex, rows_between

FAN_OUT = 16  # number of children of a node: two cache lines
MAX_TOP_SIZE = 4096  # largest number of nodes in the top level, which is searched as a whole
ALPHA_STEP = 0.01  # change of alpha after which all weights are computed again


@gin.configurable(module="alfish.replay")
@checked
class Prioritized(Sampler):
    """Draws windows by the priority of their first row, with replacement, and returns importance weights.

        P(i) = p_i^alpha / sum_k p_k^alpha        w_i = (n P(i))^-beta

    p_i is the last priority of row i, plus `epsilon`. n is the number of rows that may start a window. A new row gets
    the largest p so far, at least 1.

    With several learners, each learner uses the sum and the n of its own replay. The weights are exact if n is equal in
    all replays. Draws are independent of each other. The paper instead draws one window from each of N equal parts of
    the sum. Splitting windows into minibatches would lose this stratification.

    Args:
      alpha: exponent of priorities, in [0, 1]; 0 is uniform. A number or a schedule of progress. A schedule takes
        effect in steps of at least 0.01, because each step recomputes all p^alpha.
      beta: exponent of the importance weights, in [0, 1]; 1 removes all bias. A number or a schedule of progress.
      normalize: whether the weights of a minibatch are divided by their maximum, so that weights only reduce updates.
      epsilon: number added to every priority, so that each row can be drawn again; positive.

    Source: Schaul et al., 2016, Prioritized Experience Replay, section 3.
    """

    uses_priorities = True

    def __init__(
        self,
        alpha: UnitInterval | Schedule = 0.6,
        beta: UnitInterval | Schedule = 0.4,
        normalize: bool = True,
        epsilon: PositiveFloat = 1e-6,
    ):
        if not np.float32(epsilon) > 0:
            raise UsageError(f"Prioritized.epsilon is {epsilon}, which is 0 in float32; raise epsilon")
        self._alpha_schedule = schedule_of_progress(alpha, "Prioritized.alpha")
        self._beta_schedule = schedule_of_progress(beta, "Prioritized.beta")
        self._normalize, self._epsilon = normalize, epsilon

    def bind(self, buffer: RingBuffer, window_length: int) -> None:
        super().bind(buffer, window_length)
        num_leaves = buffer.num_envs * buffer.length
        # The leaf of a row has the index column * length + position % length. Its priority is 0 if the row may not be
        # drawn.
        self._priority = np.zeros(num_leaves, np.float32)  # p
        self._tree = SumTree(num_leaves)  # p^alpha
        self._alpha = self._exponent("alpha", self._alpha_schedule, 0.0)
        self._largest = np.float32(1)
        self._count = 0  # n
        # `RingBuffer.start_range` at the last draw: positions [low, high) of each column.
        self._low, self._high = np.zeros(buffer.num_envs, np.int64), np.zeros(buffer.num_envs, np.int64)

    def draw(self, num_windows: int, progress: float, num_batches: int = 1) -> SequenceIndex:
        beta = self._exponent("beta", self._beta_schedule, progress)
        alpha = self._exponent("alpha", self._alpha_schedule, progress)
        if abs(alpha - self._alpha) >= ALPHA_STEP:
            self._alpha = alpha
            self._weigh(np.arange(len(self._priority)))
        self._catch_up()
        if self._count == 0:
            raise no_window(self.window_length)
        # The draw uses torch's global generator, because the trainer seeds and saves that generator.
        leaf = self._tree.find(torch.rand(num_windows, dtype=torch.float64).numpy())
        column, row = np.divmod(leaf, self.buffer.length)
        low = self._low[column]
        position = low + (row - low) % self.buffer.length
        weight = (self._tree.weights(leaf) * (self._count / self._tree.total)) ** -beta
        if self._normalize:
            of_batches = weight.reshape(num_batches, -1)  # a view, without a copy
            of_batches /= self._agreed(of_batches.max(1))[:, None]
        window = column, position, weight.astype(np.float32)
        return SequenceIndex(*map(torch.from_numpy, window))

    def update(self, window: SequenceIndex, priority: torch.Tensor) -> None:
        """Sets the priorities of windows.

        Skips rows that were overwritten, and rows that may not start a window. If a window is repeated, its last
        priority counts.

        Args:
          window: windows `[N]`, on any device.
          priority: priorities `[N]`, finite and at least 0, on any device; e.g. |TD error|.

        Raises:
          UsageError: a priority is negative or not finite. No priority is then set.
        """
        column, position = window.column.cpu().numpy(), window.position.cpu().numpy()
        given = priority.detach().to("cpu", torch.float32).numpy()
        if given.shape != column.shape:
            raise UsageError(
                f"the algorithm's LossInfo.priority has shape {given.shape}; it must be one number for each of "
                f"{len(column)} windows"
            )
        fits = (given >= 0) & (given < np.inf)
        if not fits.all():
            raise UsageError(
                f"the algorithm's LossInfo.priority is {given[~fits][0]} for one of {len(given)} windows; it must be "
                "finite and at least 0, e.g. |TD error|: find what diverges, or use the absolute value"
            )
        p = given + np.float32(self._epsilon)
        self._largest = max(self._largest, p.max(initial=0))
        leaf = self._leaf(column, position)
        # A leaf may belong to a row that was pushed since the last draw. The next draw then sets the leaf again.
        kept = (position >= self._low[column]) & (position < self._high[column]) & (self._priority[leaf] > 0)
        if not kept.all():
            leaf, p = leaf[kept], p[kept]
        self._priority[leaf] = p
        self._weigh(leaf)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            "priority": torch.from_numpy(self._priority.copy()),
            "largest": torch.tensor(self._largest),
            "alpha": torch.tensor(self._alpha, dtype=torch.float64),
            "low": torch.from_numpy(self._low.copy()),
            "high": torch.from_numpy(self._high.copy()),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restores `state`; the ring's rows must be loaded first.

        Raises:
          UsageError: the state was saved with a different number of environments, or the ring lacks the state's rows.
        """
        saved_low, high, num_envs = state["low"].numpy(), state["high"].numpy(), self.buffer.num_envs
        if len(saved_low) != num_envs:
            raise UsageError(
                f"the saved priorities are for {len(saved_low)} environments, but this replay has {num_envs}; keep the "
                "number of environments"
            )
        check_held(self.buffer, self.window_length, high)
        oldest = self.buffer.oldest_position(torch.arange(num_envs)).cpu().numpy()
        self._low[:], self._high[:] = np.clip(oldest, saved_low, high), high
        self._priority[:] = 0
        source, target = state["priority"], torch.from_numpy(self._priority)
        shape = num_envs, -1
        copy_entries(source.unflatten(0, shape).T, target.unflatten(0, shape).T, self._low, self._high)
        self._largest, self._alpha = np.float32(state["largest"].item()), float(state["alpha"])
        self._count = int(np.count_nonzero(self._priority))
        self._weigh(np.arange(len(self._priority)))

    def check_valid(self) -> None:
        self._tree.check_valid()
        assert self._count == np.count_nonzero(self._priority), "the number of rows that may be drawn is outdated"
        assert self._largest >= self._priority.max() and np.isfinite(self._largest)
        everything = np.arange(len(self._priority))
        assert np.array_equal(self._tree.weights(everything), self._weights(everything)), "a weight is outdated"
        outside = np.ones(len(self._priority), bool)
        outside[self._leaf(*rows_between(self._low, self._high))] = False
        assert not self._priority[outside].any(), "a row at which no window may start has a priority"
        low, count = self.buffer.start_range(self.window_length)
        column, position = rows_between(np.maximum(low, self._low), np.minimum(low + count, self._high))
        may_start = self.buffer.may_start(column, position)
        assert np.array_equal(self._priority[self._leaf(column, position)] > 0, may_start)

    def _agreed(self, maxima: np.ndarray) -> np.ndarray:
        """Returns each minibatch's largest weight over all learners, `[K]`; also exchanges the largest priority."""
        if not replicas.is_joined():
            return maxima
        *maxima, largest = np.array(replicas.gather(*maxima, self._largest)).max(0)
        self._largest = np.float32(largest)
        return np.array(maxima)

    def _catch_up(self) -> None:
        """Sets the priorities of overwritten rows to 0, and of new rows to the largest priority."""
        low, count = self.buffer.start_range(self.window_length)
        high = low + count
        if np.array_equal(low, self._low) and np.array_equal(high, self._high):
            return
        gone = self._leaf(*rows_between(self._low, np.minimum(self._high, low)))
        self._count -= np.count_nonzero(self._priority[gone])
        self._priority[gone] = 0
        # If the last range of a column is empty, all rows in its current range are new.
        seen = np.where(self._low < self._high, self._high, 0)
        column, position = rows_between(np.maximum(seen, low), high)
        new, may_start = self._leaf(column, position), self.buffer.may_start(column, position)
        self._priority[new] = np.where(may_start, self._largest, 0)
        self._count += np.count_nonzero(may_start)
        self._weigh(np.concatenate([gone, new]))  # a new row may have the leaf of an overwritten row
        self._low, self._high = low, high

    def _leaf(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        return column * self.buffer.length + position % self.buffer.length

    def _weigh(self, leaf: np.ndarray) -> None:
        self._tree.set(leaf, self._weights(leaf))

    def _weights(self, leaf: np.ndarray) -> np.ndarray:
        """Returns p^alpha in float64; 0 if p is 0."""
        p = self._priority[leaf].astype(np.float64)
        return np.where(p > 0, p**self._alpha, 0)

    @staticmethod
    def _exponent(name: str, schedule: Schedule, progress: float) -> float:
        value = float(schedule(progress))
        if not 0 <= value <= 1:
            raise UsageError(f"Prioritized.{name} is {value} at progress {progress}; it must be in [0, 1]")
        return value


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
