"""The protocol of metrics, the moving window, and the container that passes rows to metrics."""

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from alfish import host, nest
from alfish.errors import UsageError
from alfish.errors.user_code import calling
from alfish.metrics.episode_sums import EpisodeSums, OpenEpisodes, StepSums, SummedMetric
from alfish.metrics.step_batch import InfoRow, StepBatch, own_info
from alfish.nest import Nest
from alfish.parameters.kinds import shown


class Metric(Protocol):
    """Interface of metrics: functions of raw rows with named scalar results."""

    name: str  # every result is called `name`, or `name/...`
    # Optional fields of `StepBatch` that the metric reads; other optional fields are not stored.
    reads_infos: bool = False
    reads_observations: bool = False
    reads_actions: bool = False

    @abc.abstractmethod
    def update(self, rows: StepBatch) -> None:
        """Adds the rows that follow the rows of the previous call."""

    @abc.abstractmethod
    def result(self) -> dict[str, float]:
        """Returns scalars by name; empty before the first result."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state as tensors, numbers, strings, lists and dicts."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def check_scalars(scalars: Any, what: str) -> None:
    """Raises UsageError if results are not a dict of numbers by name; the message begins with `what`."""
    asked = "it must be a dict from names to numbers"
    if not isinstance(scalars, Mapping):
        raise UsageError(f"{what} is {shown(scalars)}; {asked}")
    for name, value in scalars.items():
        try:
            is_number = not isinstance(value, str) and isinstance(float(value), float)
        except (TypeError, ValueError, OverflowError):
            is_number = False
        if not (is_number and isinstance(name, str)):
            raise UsageError(f"{what} has {shown(value)} as {name!r}; {asked}")


class MovingWindow:
    """The last `size` finite values, and the number of values that were not finite."""

    def __init__(self, size: int):
        if size < 1:
            raise UsageError(f"A metric's window is {size}; it must hold at least one value.")
        self._size = size
        self._values = np.empty(0)
        self._num_nonfinite = 0

    @property
    def size(self) -> int:
        """Largest number of values."""
        return self._size

    def extend(self, values: np.ndarray, num_nonfinite: int = 0) -> None:
        """Adds `[N]` float64 values, oldest first; also counts `num_nonfinite` values that are not finite."""
        self._num_nonfinite += num_nonfinite
        if len(values) == 0:
            return
        finite = values[np.isfinite(values)]
        self._num_nonfinite += len(values) - len(finite)
        self._values = np.concatenate([self._values, finite])[-self._size :]

    def clear(self) -> None:
        """Removes all values."""
        self._values = np.empty(0)

    def mean_and_variance(self) -> tuple[float, float] | None:
        """Returns the mean and the variance of the mean (inf for a single value); None without values."""
        count = len(self._values)
        if not count:
            return None
        with np.errstate(over="ignore"):
            variance = float(self._values.var(ddof=1)) / count if count > 1 else math.inf
            return float(self._values.mean()), variance

    def result(self, name: str) -> dict[str, float]:
        """Returns the mean, the number of averaged values (`/n`), and, if not 0, of nonfinite values (`/nonfinite`)."""
        result = {}
        if len(self._values):
            with np.errstate(over="ignore"):
                result = {name: float(self._values.mean()), f"{name}/n": float(len(self._values))}
        if self._num_nonfinite:
            result[f"{name}/nonfinite"] = float(self._num_nonfinite)
        return result

    def state_dict(self) -> dict[str, Any]:
        return {"values": torch.from_numpy(self._values.copy()), "num_nonfinite": self._num_nonfinite}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = state["values"].numpy().copy()[-self._size :]
        self._num_nonfinite = state["num_nonfinite"]


@runtime_checkable
class Summed(Protocol):
    """A metric that can receive `StepSums` instead of rows."""

    num_rewards: int  # number of newest rewards that the metric reads

    def add(self, sums: StepSums) -> None:
        """Adds the sums of the unroll that follows the unroll of the previous call."""


@runtime_checkable
class SummedByEpisode(SummedMetric, Protocol):
    """A metric of sums over episodes; `EpisodeSums` computes the metric if `takes_tensors` is True."""

    takes_tensors: bool
    window: MovingWindow
    open_sum: np.ndarray | None  # [B] float64, sums of the open episodes; None at the start


@runtime_checkable
class Windowed(Protocol):
    """A metric whose results are means of moving windows."""

    def windows(self) -> dict[str, MovingWindow]:
        """Returns the windows by the name of the result, including results without a value."""


class Metrics:
    """Passes rows to metrics, many at a time, so that short unrolls are also cheap.

    Args:
      metrics: metrics with distinct names.
      num_envs: number of environments, B.
      flush_rows: number of rows to collect before the metrics receive them. Results do not depend on this number.
      objectives: names of the R entries of vector rewards.
      reward_weights: weights `[R]` of these entries, read at each update; the caller may change them in place. None
        means 1 for all.

    Attributes:
      reads_infos: True if a metric reads infos.
      reads: names of the fields that metrics read, among 'observation' and 'action'.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        num_envs: int,
        flush_rows: int = 256,
        objectives: Sequence[str] = (),
        reward_weights: torch.Tensor | None = None,
    ):
        for metric in metrics:
            asked = "name", "update", "result", "state_dict", "load_state_dict"
            missing = [name for name in asked if not hasattr(metric, name)]
            if missing:
                raise UsageError(f"{type(metric).__name__} is not a metric; it has no {' and no '.join(missing)}")
        names = [metric.name for metric in metrics]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(f"Two metrics are called {name!r}; give one of them another `name`.")
        self._metrics = {metric.name: metric for metric in metrics}
        self._num_envs = num_envs
        self._flush_rows = flush_rows
        self._objectives, self._weights = objectives, reward_weights
        self.reads_infos = any(getattr(metric, "reads_infos", False) for metric in metrics)
        wanted = {
            "observation": any(getattr(metric, "reads_observations", False) for metric in metrics),
            "action": any(getattr(metric, "reads_actions", False) for metric in metrics),
        }
        self.reads = tuple(name for name in wanted if wanted[name])
        self._open_length = np.full(num_envs, -1)
        self._open: OpenEpisodes | None = None  # open episodes after the last `StepSums`; None if rows followed
        self._clear()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the metrics."""
        return tuple(self._metrics)

    def update(
        self,
        step_type: np.ndarray | torch.Tensor,
        reward: np.ndarray | torch.Tensor,
        infos: Sequence[InfoRow] = (),
        observation: Nest = None,
        action: Nest = None,
    ) -> None:
        """Adds copies of new rows.

        Pass each row only once, although unrolls may overlap by a row.

        Args:
          step_type, reward, infos: fields of a `StepBatch`, arrays or tensors.
          observation, action: fields of a `StepBatch`; read only if they are in `reads`.

        Raises:
          ValueError: the rows do not have `num_envs` environments, or a field that metrics read is missing.
        """
        step_type, reward = _copy(step_type), _copy(reward)
        if step_type.shape[1:] != (self._num_envs,) or reward.shape[:2] != step_type.shape:
            expected = f"[T, {self._num_envs}]"
            raise ValueError(f"Expected {expected} rows, got step_type {step_type.shape} and reward {reward.shape}.")
        if self.reads_infos:
            self._infos += [(self._num_rows + row, own_info(info)) for row, info in infos]
        for name in self.reads:
            value = observation if name == "observation" else action
            if value is None:
                raise ValueError(f"A metric reads rows.{name}, which update() did not receive.")
            self._shown[name].append(nest.map(_copy, value))
        self._step_type.append(step_type)
        self._reward.append(reward)
        if reward.ndim == 3:
            weights = np.ones(reward.shape[-1]) if self._weights is None else _numpy(self._weights)
            self._reward_weights.append(np.tile(weights, (len(reward), 1)))
        self._num_rows += len(step_type)
        if self._num_rows >= self._flush_rows:
            self._flush()

    def episode_sums(self) -> EpisodeSums | None:
        """Returns an object that sums steps, so that an unroller need not pass rows; None if rows are needed.

        Rows are needed if a metric cannot receive sums, or if rewards are vectors.
        """
        by_episode, others = self._by_episode(), self._by_step()
        needs_rows = len(by_episode) + len(others) < len(self._metrics)
        if self._objectives or self.reads or self.reads_infos or needs_rows:
            return None
        num_values = max((metric.window.size for metric in by_episode), default=0)
        return EpisodeSums(by_episode, num_values, max((metric.num_rewards for metric in others), default=0))

    def open_episodes(self, device: torch.device) -> OpenEpisodes:
        """Returns the open episodes, in tensors on a device, for `EpisodeSums`."""
        self._flush()
        if self._open is not None:
            return self._open
        totals = [metric.open_sum for metric in self._by_episode()]
        arrays = [np.zeros(self._num_envs) if total is None else total for total in totals]
        length = torch.from_numpy(self._open_length.copy()).to(device)
        return OpenEpisodes(length, tuple(torch.from_numpy(array.copy()).to(device) for array in arrays))

    def add(self, sums: StepSums) -> None:
        """Adds an unroll whose rows were summed by the object that `episode_sums` returned."""
        self._flush()
        for metric in self._by_step():
            metric.add(sums)
        for by_episode, values, num_nonfinite in zip(self._by_episode(), sums.values, sums.num_nonfinite):
            by_episode.window.extend(values, num_nonfinite)
        self._open = sums.open

    def results(self) -> dict[str, float]:
        """Returns the scalars of all metrics over all rows so far.

        Raises:
          CodeError: a metric raised an error.
          UsageError: a metric did not return a dict of numbers.
        """
        self._flush()
        found: dict[str, float] = {}
        for metric in self._metrics.values():
            with calling(f"{type(metric).__name__}.result"):
                result = metric.result()
            check_scalars(result, f"the result of {type(metric).__name__}")
            found |= result
        return found

    def windows(self) -> dict[str, MovingWindow]:
        """Returns the windows of results that are means, by the name of the result.

        A metric with such results has a method `windows`, see `Windowed`.
        """
        self._flush()
        found: dict[str, MovingWindow] = {}
        for metric in self._metrics.values():
            found |= metric.windows() if isinstance(metric, Windowed) else {}
        return found

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        self._settle()
        metrics = {name: metric.state_dict() for name, metric in self._metrics.items()}
        return {"open_length": torch.from_numpy(self._open_length.copy()), "metrics": metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state, also in the middle of episodes.

        If environments have been reset, their FIRST rows end the open episodes without counting them. A metric that is
        not in the state starts empty. Because such a metric has missed the beginnings of the open episodes, no metric
        counts these episodes.

        Raises:
          UsageError: the state has a different number of environments.
        """
        num_envs = len(state["open_length"])
        if num_envs != self._num_envs:
            raise UsageError(
                f"The saved metrics are for {num_envs} environments, not {self._num_envs}; set num_envs = {num_envs}."
            )
        self._clear()
        self._open = None
        self._open_length = state["open_length"].numpy().copy()
        if self._metrics.keys() - state["metrics"].keys():
            self._open_length[:] = -1
        for name, metric_state in state["metrics"].items():
            if name in self._metrics:
                self._metrics[name].load_state_dict(metric_state)

    def _clear(self) -> None:
        self._step_type: list[np.ndarray] = []
        self._reward: list[np.ndarray] = []
        self._reward_weights: list[np.ndarray] = []
        self._infos: list[InfoRow] = []
        self._shown: dict[str, list[Nest]] = {name: [] for name in self.reads}
        self._num_rows = 0

    def _by_episode(self) -> list[SummedByEpisode]:
        """Returns the `SummedByEpisode` metrics that take tensors.

        A class must set `takes_tensors` itself, because a subclass may override a method with a method for arrays only.
        """
        metrics = self._metrics.values()
        return [one for one in metrics if isinstance(one, SummedByEpisode) and vars(type(one)).get("takes_tensors")]

    def _by_step(self) -> list[Summed]:
        """Returns the metrics that can receive `StepSums`.

        A subclass that overrides `update` but not `add` needs rows, because `add` would ignore the override.
        """
        metrics = self._metrics.values()
        return [one for one in metrics if isinstance(one, Summed) and _defines_together(type(one), "update", "add")]

    def _settle(self) -> None:
        """Moves the open episodes to the host, so that rows can continue them."""
        if self._open is None:
            return
        self._open_length, totals = host.read((self._open.length, list(self._open.totals)))
        for metric, total in zip(self._by_episode(), totals):
            metric.open_sum = total
        self._open = None

    def _flush(self) -> None:
        if self._num_rows == 0:
            return
        self._settle()
        step_type, reward = np.concatenate(self._step_type), np.concatenate(self._reward)
        shown = {name: nest.map(lambda *rows: np.concatenate(rows), *parts) for name, parts in self._shown.items()}
        weights = np.concatenate(self._reward_weights) if self._reward_weights else None
        own = {**shown, "objectives": self._objectives, "reward_weights": weights}
        infos = host.read(self._infos)  # tensors on a device are read here, all in one copy
        rows = StepBatch(step_type, reward, infos, self._open_length, **own)
        self._clear()
        self._open_length = rows.next_open_length
        for metric in self._metrics.values():
            with calling(f"{type(metric).__name__}.update"):
                metric.update(rows)


def _defines_together(kind: type, *methods: str) -> bool:
    """Returns whether all the methods of `kind` come from the same class in its hierarchy."""
    return len({next(each for each in kind.__mro__ if method in vars(each)) for method in methods}) == 1


def _numpy(array: np.ndarray | torch.Tensor) -> np.ndarray:
    return array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)


def _copy(array: np.ndarray | torch.Tensor) -> np.ndarray:
    return np.array(_numpy(array))
