"""Scalars that environments and simulators report in their infos.

In gymnasium's format for vector environments, an info is a dict of arrays `[B, ...]`. The mask `_key` is True for
environments that reported `key`; other environments have 0 in the array. Nested dicts have masks at both levels. Masks
may be missing.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import gin
import numpy as np
import torch
from absl import logging

from alfish.errors import UsageError
from alfish.metrics.metric import Metric, MovingWindow
from alfish.metrics.step_batch import StepBatch
from alfish.parameters import PositiveInt, checked

SUCCESS = ("success", "is_success")  # names that environments commonly give to the success of an episode
ENOUGH_ROWS = 20  # number of rows after which a name in `include` that matches no number is reported


@gin.configurable(module="alfish.metrics")
@checked
class EnvInfo(Metric):
    """Means of numbers in infos, one scalar per key: `env_info/<key>`, `env_info/<key>.<nested key>`.

    Values that are not one number per environment (strings, None, objects, larger arrays) are ignored. The mean of a
    key is taken over the environments that reported it, so each mean has a separate count `/n`.

    Args:
      include: globs; a flattened name (`a.b.c`) must match at least one.
      exclude: globs; a flattened name must match none.
      when: rows to read. `episode_end` reads LAST rows, `step` reads each environment step, and `sum` adds up the steps
        of an episode. FIRST rows are not read. `episode_end` and `sum` are averaged over episodes.
      window: number of latest episodes in the mean; with `step`, number of latest environment steps. None means 100
        episodes or 10_000 steps.
      name: first part of the results' names; each `EnvInfo` needs a different name.
    """

    reads_infos = True

    def __init__(
        self,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        when: Literal["episode_end", "step", "sum"] = "episode_end",
        window: PositiveInt | None = None,
        name: str = "env_info",
    ):
        for globs in (include, exclude):
            if isinstance(globs, str):
                raise UsageError(f"EnvInfo requires lists of globs, not the string {globs!r}; write [{globs!r}].")
        self.name = name
        self._include, self._exclude, self._when = include, exclude, when
        self._window_size = window if window is not None else 10_000 if when == "step" else 100
        self._windows: dict[str, MovingWindow] = {}
        self._open: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # for `sum`: totals and numbers of reports, [B]
        self._wanted: dict[str, bool] = {}
        # Globs that have matched no number so far (empty after the warning), and the keys in the infos that were read.
        self._unmatched = {glob for glob in include if glob.strip("*.?")}
        self._keys: set[str] = set()
        self._num_read = 0  # number of rows that were read

    def update(self, rows: StepBatch) -> None:
        if self._when == "sum":
            self._add_up(rows, self._read(rows, rows.counted))
            return
        where = rows.ended if self._when == "episode_end" else rows.arrived
        for key, (values, present) in self._read(rows, where).items():
            self._window_of(key).extend(values[present])

    def windows(self) -> dict[str, MovingWindow]:
        return {f"{self.name}/{key}": self._windows[key] for key in sorted(self._windows)}

    def result(self) -> dict[str, float]:
        result: dict[str, float] = {}
        for name, window in self.windows().items():
            result |= window.result(name)
        return result

    def state_dict(self) -> dict[str, Any]:
        return {
            "windows": {key: window.state_dict() for key, window in self._windows.items()},
            "open": {key: [torch.from_numpy(array.copy()) for array in pair] for key, pair in self._open.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._windows = {}
        for key, window_state in state["windows"].items():
            self._window_of(key).load_state_dict(window_state)
        self._open = {key: tuple(array.numpy().copy() for array in pair) for key, pair in state["open"].items()}

    def _window_of(self, key: str) -> MovingWindow:
        if key not in self._windows:
            self._windows[key] = MovingWindow(self._window_size)
        return self._windows[key]

    def _add_up(self, rows: StepBatch, reported: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        nothing = np.zeros(rows.step_type.shape), np.zeros(rows.step_type.shape, bool)
        for key in self._open.keys() | reported.keys():
            values, present = reported.get(key, nothing)
            open_sum, open_count = self._open.get(key, (None, None))
            total, open_sum = rows.episode_sums(values, open_sum)
            count, open_count = rows.episode_sums(present.astype(np.float64), open_count)
            self._open[key] = open_sum, open_count
            if count.any():
                self._window_of(key).extend(total[count > 0])  # an episode without reports has no sum

    def _read(self, rows: StepBatch, where: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns, by flattened key, the values `[T, B]` (float64, 0 where absent) and their mask `[T, B]` bool.

        Args:
          rows: rows with the infos.
          where: rows to read, `[T, B]` bool.
        """
        columns = {}
        for row, info in rows.infos:
            for key, value, present in _at_row(info, where[row], rows.last[row]):
                if self._unmatched:
                    self._keys.add(key)
                if not self._wants(key):
                    continue
                numbers = _numbers(value, present)
                if numbers is None:
                    continue
                if self._unmatched:
                    self._unmatched = {glob for glob in self._unmatched if not fnmatchcase(key, glob)}
                if key not in columns:
                    columns[key] = np.zeros(where.shape), np.zeros(where.shape, bool)
                values, presences = columns[key]
                np.copyto(values[row], numbers[0], where=numbers[1])
                presences[row] |= numbers[1]
        if self._unmatched:
            self._num_read += int(where.sum())
            self._warn()
        return columns

    def _warn(self) -> None:
        """Warns once about globs in `include` that match no number; they may be misspelt."""
        if self._num_read < ENOUGH_ROWS:
            return
        rows = "at the ends of episodes" if self._when == "episode_end" else "in steps"
        keys = f"has {', '.join(sorted(self._keys)[:20])}" if self._keys else "is empty"
        logging.warning(
            "EnvInfo.include has %s, which matches no number in the infos so far; the info %s %s",
            ", ".join(map(repr, sorted(self._unmatched))),
            rows,
            keys,
        )
        self._unmatched = set()

    def _wants(self, key: str) -> bool:
        if key not in self._wanted:
            self._wanted[key] = _matches(key, self._include) and not _matches(key, self._exclude)
        return self._wanted[key]


@gin.configurable(module="alfish.metrics")
@checked
class SimulatorLog(Metric):
    """Means of numbers that a simulator logs (`environments.SimulatorStep.log`) over the steps that logged them.

    There is one scalar per key, such as `simulator/Episode_Reward/track`. Only single numbers are read; `EnvInfo` reads
    values with one number for each environment.

    Args:
      window: number of latest values of a key in the mean.
      name: first part of the results' names.
    """

    reads_infos = True

    def __init__(self, window: PositiveInt = 100, name: str = "simulator"):
        self.name, self._size = name, window
        self._windows: dict[str, MovingWindow] = {}

    def update(self, rows: StepBatch) -> None:
        found: dict[str, list[float]] = {}
        for _, info in rows.infos:
            for key, value in info.items():
                if isinstance(value, (int, float, np.number, np.ndarray, torch.Tensor)) and np.ndim(value) == 0:
                    found.setdefault(str(key).strip("/"), []).append(float(value))
        for key, values in found.items():
            self._windows.setdefault(key, MovingWindow(self._size)).extend(np.array(values))

    def result(self) -> dict[str, float]:
        result: dict[str, float] = {}
        for key in sorted(self._windows):
            result |= self._windows[key].result(f"{self.name}/{key}")
        return result

    def state_dict(self) -> dict[str, Any]:
        return {key: window.state_dict() for key, window in self._windows.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._windows = {}
        for key, window_state in state.items():
            self._windows[key] = MovingWindow(self._size)
            self._windows[key].load_state_dict(window_state)


class EpisodeInfos:
    """Numbers in the infos at the ends of episodes.

    Args:
      include: globs; a flattened name (`a.b.c`) must match at least one.
      num_episodes: number of episodes, E.

    Attributes:
      values: values by flattened name, `[E]` float64; nan for episodes that reported no finite number.
    """

    def __init__(self, include: Sequence[str], num_episodes: int):
        self._include, self._num_episodes = include, num_episodes
        self.values: dict[str, np.ndarray] = {}

    def add(self, info: dict, episode: np.ndarray, ended: np.ndarray) -> None:
        """Reads the info of a vector step.

        Args:
          info: info of B environments, in gymnasium's format.
          episode: index of each environment's episode, `[B]` int.
          ended: environments whose episodes have ended, `[B]` bool.
        """
        for key, value, present in _at_row(info, ended, ended):
            numbers = _numbers(value, present) if _matches(key, self._include) else None
            if numbers is not None:
                values = np.where(np.isfinite(numbers[0]), numbers[0], np.nan)
                own = self.values.setdefault(key, np.full(self._num_episodes, np.nan))
                own[episode[numbers[1]]] = values[numbers[1]]

    def unmatched(self) -> list[str]:
        """Returns the globs that have matched no number, except `SUCCESS` and globs of wildcards only."""
        named = [glob for glob in self._include if glob not in SUCCESS and glob.strip("*.?")]
        return [glob for glob in named if not any(fnmatchcase(key, glob) for key in self.values)]


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _at_row(info: dict, where: np.ndarray, last: np.ndarray) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Yields (flattened key, array, mask `[B]`) of one row; reads LAST rows from `final_info` if there is one.

    A vector environment in the mode SAME_STEP reports an episode's end in `final_info`, and the next episode's start
    outside of it.
    """
    if not where.any():
        return
    if "final_info" in info:
        final = where & last & _mask(info, "final_info", len(where))
        where = where & ~final
        if isinstance(info["final_info"], dict):
            yield from _flatten(info["final_info"], final)
    yield from _flatten(info, where)


def _flatten(info: dict, where: np.ndarray, prefix: str = "") -> Iterator[tuple[str, Any, np.ndarray]]:
    masks = {f"_{key}" for key in info}
    for key, value in info.items():
        if key in masks or (not prefix and key in ("final_obs", "final_info")):
            continue
        present = where & _mask(info, key, len(where))
        if not present.any():
            continue
        if isinstance(value, dict):
            yield from _flatten(value, present, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, present


def _mask(info: dict, key: Any, num_envs: int) -> np.ndarray:
    """Returns the mask `[B]` bool of environments that reported `key`; all True if the info has no mask for `key`."""
    mask = info.get(f"_{key}")
    if isinstance(mask, np.ndarray | torch.Tensor):
        mask = np.asarray(mask.cpu() if isinstance(mask, torch.Tensor) else mask)
        if mask.dtype == bool and mask.shape == (num_envs,):
            return mask
    return np.ones(num_envs, bool)


def _numbers(value: Any, present: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns `value` as float64 numbers and their mask, `[B]` each; None if no environment has exactly one number."""
    if isinstance(value, torch.Tensor):
        value = None if value.is_complex() else value.detach().cpu().double().numpy()
    if not isinstance(value, np.ndarray) or value.shape[:1] != present.shape:
        return None
    if value.dtype.kind in "biuf" and value.size == len(present):
        return value.reshape(-1).astype(np.float64), present
    if value.dtype.kind != "O" or value.ndim != 1:
        return None
    # gymnasium makes an object array if the first environment's value is not a number.
    numbers = [_number(item) if there else None for item, there in zip(value, present, strict=True)]
    found = np.array([number is not None for number in numbers])
    return (np.array([0.0 if number is None else number for number in numbers]), found) if found.any() else None


def _number(item: Any) -> float | None:
    if isinstance(item, torch.Tensor) and not item.is_complex():
        item = item.detach().cpu().double().numpy()
    if isinstance(item, np.ndarray | np.generic) and item.dtype.kind in "biuf" and item.size == 1:
        item = item.item()
    if not isinstance(item, int | float):
        return None
    try:
        return float(item)
    except OverflowError:  # an integer beyond all floats
        return None
