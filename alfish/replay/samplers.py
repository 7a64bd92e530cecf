"""Which windows of a ring are drawn: uniformly, by priority, or each once in every pass.

A sampler serves one ring, and does not hook into it: when it draws, it looks which rows have come and gone since.
"""

import abc
from typing import ClassVar

import gin
import numpy as np
import torch

from alfish.errors import UsageError
from alfish.parameters import PositiveFloat, PositiveInt, UnitInterval, checked
from alfish.replay.ring_buffer import RingBuffer, no_window
from alfish.replay.sequence_index import SequenceIndex
from alfish.replay.start_index import rows_between
from alfish.replay.sum_tree import SumTree
from alfish.schedules import Schedule, as_schedule

ALPHA_STEP = 0.01  # that an alpha moves before all weights are made anew


class Sampler(abc.ABC):
    """Which windows of a ring are drawn. `bind` it once, then draw. One sampler serves one ring.

    Its state belongs to the ring's rows: save both or neither, and load the rows first.
    """

    uses_priorities: ClassVar[bool] = False  # whether `update` must hear of what an update made of its windows
    buffer: RingBuffer  # after `bind`
    window_length: int  # after `bind`

    def bind(self, buffer: RingBuffer, window_length: int) -> None:
        """Takes the ring that it serves.

        Args:
          buffer: draws come out on its device.
          window_length: L, rows of every window.

        Raises:
          UsageError: it serves a ring already.
        """
        name = type(self).__name__
        if hasattr(self, "buffer"):
            raise UsageError(f"{name} serves a replay already; make another {name} for this one")
        self.buffer, self.window_length = buffer, window_length

    @abc.abstractmethod
    def draw(self, num_windows: int, progress: float, num_batches: int = 1) -> SequenceIndex:
        """Where some windows start.

        Args:
          num_windows: N, of all minibatches together.
          progress: of the run, in [0, 1].
          num_batches: how many minibatches they are cut into, one after another.

        Returns:
          `[N]` each, on the ring's device. Any part of them, in a row, is a fair draw.

        Raises:
          UsageError: no row can start a window yet.
        """

    def update(self, window: SequenceIndex, priority: torch.Tensor) -> None:
        """Remembers how much windows that were drawn here deserve to be drawn again.

        Args:
          window: `[N]`, on any device.
          priority: `[N]`, finite and at least 0, on any device.
        """
        raise TypeError(f"{type(self).__name__} draws by no priorities; see Sampler.uses_priorities")

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...

    def check_valid(self) -> None:
        """Raises AssertionError where its books do not agree with one another, or with the ring."""


@gin.configurable(module="alfish.replay")
@checked
class Uniform(Sampler):
    """Every window alike, with replacement; or a share of them from the newest rows.

    Args:
      recent_fraction: fraction of the windows, in [0, 1], that start among the newest rows. It holds over a run, and
        over any part of it to within one window. Where none of the newest rows may start a window, all rows are drawn
        from.
      recent_rows: how many rows of all environments together are the newest; each has its part of them.
    """

    def __init__(self, recent_fraction: UnitInterval = 0.0, recent_rows: PositiveInt | None = None):
        if recent_fraction > 0 and recent_rows is None:
            raise UsageError(
                f"Uniform.recent_fraction is {recent_fraction}; set Uniform.recent_rows to the number of newest rows"
            )
        self._recent_fraction, self._recent_rows = recent_fraction, recent_rows
        self._num_drawn = 0  # windows, ever

    def bind(self, buffer: RingBuffer, window_length: int) -> None:
        super().bind(buffer, window_length)
        if self._recent_fraction == 0:
            return
        assert self._recent_rows is not None
        self._newest = self._recent_rows // buffer.num_envs
        # A state may be kept at the first row of a stretch, and the next one at the last row of its stretch.
        needed = window_length + 2 * (buffer.state_period or 0)
        if self._newest < needed:
            raise UsageError(
                f"Uniform.recent_rows is {self._recent_rows}, {self._newest} of each of {buffer.num_envs} "
                f"environments, and windows take {needed}; raise it to {needed * buffer.num_envs}"
            )

    def draw(self, num_windows: int, progress: float, num_batches: int = 1) -> SequenceIndex:
        if self._recent_fraction == 0:
            return self.buffer.draw(num_windows, self.window_length)
        # Window k of the run is recent where the fraction of k + 1 windows holds one more than that of k.
        due = np.floor(self._recent_fraction * np.arange(self._num_drawn, self._num_drawn + num_windows + 1) + 1e-9)
        recent = torch.from_numpy(np.diff(due) > 0).to(self.buffer.device)
        column, position = (torch.empty(num_windows, dtype=torch.int64, device=self.buffer.device) for _ in range(2))
        for chosen, newest in ((recent, self._newest), (~recent, None)):
            count = int(chosen.sum())
            if count:
                column[chosen], position[chosen], _ = self.buffer.draw(count, self.window_length, newest)
        self._num_drawn += num_windows
        return SequenceIndex(column, position)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"num_drawn": torch.tensor(self._num_drawn)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._num_drawn = int(state["num_drawn"])


@gin.configurable(module="alfish.replay")
@checked
class Prioritized(Sampler):
    """Windows by the priority of their first row, with replacement, and weights that make up for it.

        P(i) = p_i^alpha / sum_k p_k^alpha        w_i = (n P(i))^-beta

    Here p_i is the priority last given plus `epsilon`, and n counts the rows that may start a window. At the first draw
    that may start there, a row gets the largest p seen so far, and 1 at least.

    Draws are independent of one another; the paper draws one in each N-th of the sum, which a cut into minibatches
    would not survive.

    Args:
      alpha: how much priorities matter, in [0, 1]: a number, or a schedule of progress. All p^alpha are made anew where
        alpha has moved by 0.01 or more, and in between it stands still.
      beta: how much of the bias is made up for, in [0, 1]: 1 is all; a number, or a schedule of progress.
      normalize: divide a minibatch's weights by their largest, so that they only ever shrink a step.
      epsilon: is added to every priority, so that no row is lost for good; positive.

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
            raise UsageError(f"Prioritized.epsilon is {epsilon}, which is 0 in float32; raise it")
        self._alpha_schedule, self._beta_schedule = as_schedule(alpha), as_schedule(beta)
        self._normalize, self._epsilon = normalize, epsilon

    def bind(self, buffer: RingBuffer, window_length: int) -> None:
        super().bind(buffer, window_length)
        num_leaves = buffer.num_envs * buffer.length
        # Leaf column * length + position % length is that of a row; priorities of those that may not be drawn are 0.
        self._priority = np.zeros(num_leaves, np.float32)  # p
        self._tree = SumTree(num_leaves)  # p^alpha
        self._alpha = self._exponent("alpha", self._alpha_schedule, 0.0)
        self._largest = np.float32(1)
        self._count = 0  # n
        # Positions of each column that the last draw could start at, as far as `RingBuffer.start_range` goes.
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
        # torch's generator, which the trainer seeds and saves.
        leaf = self._tree.find(torch.rand(num_windows, dtype=torch.float64).numpy())
        column, row = np.divmod(leaf, self.buffer.length)
        low = self._low[column]
        position = low + (row - low) % self.buffer.length
        weight = (self._tree.weights(leaf) * (self._count / self._tree.total)) ** -beta
        if self._normalize:
            of_batches = weight.reshape(num_batches, -1)  # a view
            of_batches /= of_batches.max(1, keepdims=True)
        window = column, position, weight.astype(np.float32)
        return SequenceIndex(*(torch.from_numpy(leaf).to(self.buffer.device) for leaf in window))

    def update(self, window: SequenceIndex, priority: torch.Tensor) -> None:
        """Remembers the priorities of windows.

        Those of rows that have been overwritten meanwhile, and that never could start a window, are dropped. Where a
        window comes twice, its last priority counts.

        Args:
          window: `[N]`, on any device.
          priority: `[N]`, finite and at least 0, on any device: |TD error|, say.

        Raises:
          UsageError: a priority is not finite, or negative. None is remembered then.
        """
        column, position = window.column.cpu().numpy(), window.position.cpu().numpy()
        given = priority.detach().to("cpu", torch.float32).numpy()
        if given.shape != column.shape:
            raise UsageError(
                f"the algorithm's LossInfo.priority has shape {given.shape}; it is one number for each of "
                f"{len(column)} windows"
            )
        fits = (given >= 0) & (given < np.inf)
        if not fits.all():
            raise UsageError(
                f"the algorithm's LossInfo.priority is {given[~fits][0]} for one of {len(given)} windows; it is finite "
                "and at least 0, as |TD error| is: look for what diverges, or has a sign"
            )
        p = given + np.float32(self._epsilon)
        self._largest = max(self._largest, p.max(initial=0))
        leaf = self._leaf(column, position)
        # Rows that came since the last draw are not looked at: the next one replaces what is written in their places.
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
        """Continues from `state`, when the ring has its rows again.

        Raises:
          UsageError: it was saved with another capacity or number of environments, or the ring does not hold its rows.
        """
        if len(state["priority"]) != len(self._priority) or len(state["low"]) != len(self._low):
            raise UsageError(
                f"the saved priorities are of {len(state['low'])} columns and {len(state['priority'])} rows, this "
                f"replay is of {len(self._low)} and {len(self._priority)}; keep the capacity and the number of "
                "environments"
            )
        _check_held(self.buffer, self.window_length, state["high"].numpy())
        self._priority[:] = state["priority"].numpy()
        self._low[:], self._high[:] = state["low"].numpy(), state["high"].numpy()
        self._largest, self._alpha = np.float32(state["largest"].item()), float(state["alpha"])
        self._count = int(np.count_nonzero(self._priority))
        self._weigh(np.arange(len(self._priority)))

    def check_valid(self) -> None:
        self._tree.check_valid()
        assert self._count == np.count_nonzero(self._priority), "the number of rows that may be drawn is out of date"
        assert self._largest >= self._priority.max() and np.isfinite(self._largest)
        everything = np.arange(len(self._priority))
        assert np.array_equal(self._tree.weights(everything), self._weights(everything)), "a weight is out of date"
        outside = np.ones(len(self._priority), bool)
        outside[self._leaf(*rows_between(self._low, self._high))] = False
        assert not self._priority[outside].any(), "a row that no window may start at has a priority"
        low, count = self.buffer.start_range(self.window_length)
        column, position = rows_between(np.maximum(low, self._low), np.minimum(low + count, self._high))
        may_start = self.buffer.may_start(column, position)
        assert np.array_equal(self._priority[self._leaf(column, position)] > 0, may_start)

    def _catch_up(self) -> None:
        """Takes the priorities of rows that are gone, and gives new rows the largest."""
        low, count = self.buffer.start_range(self.window_length)
        high = low + count
        if np.array_equal(low, self._low) and np.array_equal(high, self._high):
            return
        gone = self._leaf(*rows_between(self._low, np.minimum(self._high, low)))
        self._count -= np.count_nonzero(self._priority[gone])
        self._priority[gone] = 0
        # Where a range was empty, its end says nothing: nobody has looked at the rows before it.
        seen = np.where(self._low < self._high, self._high, 0)
        column, position = rows_between(np.maximum(seen, low), high)
        new, may_start = self._leaf(column, position), self.buffer.may_start(column, position)
        self._priority[new] = np.where(may_start, self._largest, 0)
        self._count += np.count_nonzero(may_start)
        self._weigh(np.concatenate([gone, new]))  # a new row may lie where one is gone
        self._low, self._high = low, high

    def _leaf(self, column: np.ndarray, position: np.ndarray) -> np.ndarray:
        return column * self.buffer.length + position % self.buffer.length

    def _weigh(self, leaf: np.ndarray) -> None:
        self._tree.set(leaf, self._weights(leaf))

    def _weights(self, leaf: np.ndarray) -> np.ndarray:
        """p^alpha, in float64, and 0 where p is."""
        p = self._priority[leaf].astype(np.float64)
        return np.where(p > 0, p**self._alpha, 0)

    @staticmethod
    def _exponent(name: str, schedule: Schedule, progress: float) -> float:
        value = float(schedule(progress))
        if not 0 <= value <= 1:
            raise UsageError(f"Prioritized.{name} is {value} at progress {progress}; it is in [0, 1]")
        return value


@gin.configurable(module="alfish.replay")
@checked
class Epochs(Sampler):
    """Every window once, in random order, before any comes again: for imitation, and to train on a whole buffer.

    A pass is over the rows that could start a window when it began. Of these, those overwritten meanwhile are left out;
    rows that have come meanwhile wait for the next pass. A draw that reaches a pass's end goes on in the next.
    """

    def bind(self, buffer: RingBuffer, window_length: int) -> None:
        super().bind(buffer, window_length)
        self._column = self._position = np.zeros(0, np.int64)  # what is left of the pass

    def draw(self, num_windows: int, progress: float, num_batches: int = 1) -> SequenceIndex:
        low, count = self.buffer.start_range(self.window_length)
        columns, positions, missing = [], [], num_windows
        while missing:
            if not len(self._column):
                self._begin(low, low + count)
            column, position = self._column[:missing], self._position[:missing]
            self._column, self._position = self._column[missing:], self._position[missing:]
            there = position >= low[column]
            columns.append(column[there])
            positions.append(position[there])
            missing -= len(columns[-1])
        start = np.concatenate(columns), np.concatenate(positions)
        return SequenceIndex(*(torch.from_numpy(leaf).to(self.buffer.device) for leaf in start))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"column": torch.from_numpy(self._column.copy()), "position": torch.from_numpy(self._position.copy())}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continues from `state`, when the ring has its rows again.

        Raises:
          UsageError: the ring does not hold its rows.
        """
        column, position = state["column"].numpy().copy(), state["position"].numpy().copy()
        high = np.zeros(max(self.buffer.num_envs, column.max(initial=-1) + 1), np.int64)
        np.maximum.at(high, column, position + 1)
        _check_held(self.buffer, self.window_length, high)
        self._column, self._position = column, position

    def check_valid(self) -> None:
        low, count = self.buffer.start_range(self.window_length)
        there = self._position >= low[self._column]
        column, position = self._column[there], self._position[there]
        assert (position < (low + count)[column]).all() and self.buffer.may_start(column, position).all()
        assert len(set(zip(column.tolist(), position.tolist()))) == len(column), "a window comes twice in a pass"

    def _begin(self, low: np.ndarray, high: np.ndarray) -> None:
        """Starts a pass over the rows that may start a window now."""
        column, position = rows_between(low, high)
        may_start = np.flatnonzero(self.buffer.may_start(column, position))
        if not len(may_start):
            raise no_window(self.window_length)
        order = may_start[torch.randperm(len(may_start)).numpy()]
        self._column, self._position = column[order], position[order]


def _check_held(buffer: RingBuffer, window_length: int, high: np.ndarray) -> None:
    """Raises where a ring has not come as far as the positions (`[B]`) that a sampler was saved with."""
    low, count = buffer.start_range(window_length)
    if len(high) != len(low) or (high > low + count).any():
        raise UsageError(
            "the saved state of the sampler is of rows that this replay does not hold; load the rows that were saved "
            "with it first, or neither"
        )
