"""Recorded episodes in a replay ring that is filled once and is read-only afterwards."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import gin
import numpy as np
import torch

from alfish import nest
from alfish.data import Experience, StepType
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeEncoder, EpisodeSource
from alfish.offline.recorded_spaces import NO_SPACES, Spaces, check_fit, check_rewards, spaces_of
from alfish.offline.source_reading import SourceReading, selected
from alfish.parameters import PositiveInt, Range, Rate, UnitInterval, checked
from alfish.replay import RingBuffer, RingView

PUSHED_ROWS, PUSHED_BYTES = 4096, 2**27  # limits of one copy: rows per column, and bytes over all columns


class StoredEpisode(NamedTuple):
    """Place of an episode in the ring: rows `position` to `position + length`, inclusive, of column `column`."""

    id: str
    column: int
    position: int
    length: int  # number of transitions
    return_: float  # undiscounted return


class EpisodeBuffer(RingBuffer):
    """A read-only ring of episodes; windows are drawn as in `RingBuffer`.

    Episodes are placed from the longest to the shortest, each in the currently shortest column. The `env_id` of a
    row is the index of its column, because the rows do not come from environments.

    Args:
      episodes: validated episodes; the list is emptied while the ring is filled, so that episodes are not in memory
        twice.
      spaces: spaces of the episodes.
      num_columns, action_limit, device, directory, keeps_episodes, return_gamma: settings of the ring, as for
        `OfflineBuffer`.

    Attributes:
      episodes: place of each episode in the ring, in the order of the argument `episodes`.
    """

    has_newest = False  # rows are ordered by the lengths of episodes, not by time

    def __init__(
        self,
        episodes: list[Episode],
        spaces: Spaces,
        num_columns: int,
        action_limit: float,
        device: torch.device | str = "cpu",
        directory: str | Path | None = None,
        keeps_episodes: bool = False,
        return_gamma: float | None = None,
    ):
        columns = packed_columns([episode.length + 1 for episode in episodes], num_columns)
        self._ends = np.array([sum(episodes[i].length + 1 for i in column) for column in columns])
        super().__init__(
            int(self._ends.max()) * len(columns),
            len(columns),
            device,
            directory,
            keeps_episodes=keeps_episodes,
            return_gamma=return_gamma,
        )
        self.episodes = _stored(episodes, columns)
        self._fill(episodes, columns, EpisodeEncoder(spaces, action_limit))

    def push(self, experience: Experience) -> NoReturn:
        """Raises TypeError, because the ring is read-only."""
        raise TypeError("an OfflineBuffer is read-only; push to a separate RingBuffer")

    def clear(self) -> NoReturn:
        """Raises TypeError, because the ring is read-only."""
        raise TypeError("an OfflineBuffer is read-only")

    def start_range(self, window_length: int, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns each column's range in which windows of two rows may start, whatever `window_length` is.

        No rows are added later, so the last transitions of a column may also start windows. If such a window is longer
        than two rows, it repeats the column's LAST row.
        """
        return super().start_range(2, newest)

    def in_place(self, window_length: int) -> RingView | None:
        """Returns None for windows of more than two rows, because they may exceed the end of a column."""
        return super().in_place(window_length) if window_length == 2 else None

    def _read(self, column: np.ndarray, position: np.ndarray) -> Experience:
        """Returns rows. Positions beyond an end of a column give its first or last row; such copies do not train."""
        return super()._read(column, np.clip(position, 0, self._ends[column] - 1))

    def _fill(self, episodes: list[Episode], columns: list[list[int]], encoder: EpisodeEncoder) -> None:
        """Pushes the rows of all columns, with PAD rows at the end of shorter columns. Empties `episodes`."""
        example = encoder.rows(episodes[0])
        left: list[Episode | None] = list(episodes)
        episodes.clear()  # an episode's memory is freed when its rows are in the ring
        readers = [_RowReader(_taken(left, column)) for column in columns]

        def empty(count: int) -> Experience:
            rows = nest.map(lambda leaf: np.zeros((count, len(columns), *leaf.shape[1:]), leaf.dtype), example)
            rows.time_step.step_type[:] = StepType.PAD
            rows.time_step.env_id[:] = np.arange(len(columns))
            return rows

        row_bytes = len(columns) * sum(leaf[0].nbytes for leaf in nest.leaves(example))
        size = max(1, min(PUSHED_ROWS, PUSHED_BYTES // row_bytes))
        for start in range(0, self.length, size):
            rows = empty(min(size, self.length - start))
            for b, reader in enumerate(readers):
                reader.read_into(nest.at(rows, (slice(None), b)), encoder)
            super().push(nest.map(torch.from_numpy, rows))


@gin.configurable(module="alfish.offline")
@checked
class OfflineBuffer(EpisodeBuffer):
    """A ring of the episodes of several sources, see `EpisodeBuffer`.

    Args:
      sources: sources of the episodes: `scheme:where`, see `alfish.offline.sources`; or `EpisodeSource` objects.
      length: maximum total number of rows; an episode of T transitions has T+1 rows. From the first episode that does
        not fit, all episodes are left out, and the report lists them. None means no limit.
      policy: treatment of faulty episodes: 'raise', 'drop_episode' or 'warn', see `Validator`.
      env_id: environment whose spaces the data must fit; required if neither a source nor `spaces` gives the spaces.
      spaces: spaces that the data must fit, instead of `env_id`; `OfflineBatches` and `ReplayBatches` give those of the
        run's environment.
      top_fraction: fraction of the episodes to keep, in (0, 1]: the episodes with the greatest returns, at least one.
      holdout_fraction: fraction of the episodes in `holdout`, in [0, 1). These episodes do not train; they are evenly
        spaced in the order of the sources.
      num_columns: maximum number of columns of the ring, over which the episodes are distributed.
      action_limit: largest magnitude of trained Box actions, in (0, 1]; larger actions are clipped, because a tanh
        policy has infinite log-probability at +-1. `prev_action` is the executed action without clipping.
      device: device of the rows and of the windows.
      directory: directory for memory-mapped files of the rows, on the CPU; None means that rows are in memory. In both
        cases the episodes are first read into memory.
      keeps_episodes: whether the buffer indexes the start and the end of each row's episode, for `HindsightReplay`.
      return_gamma: discount per environment step of `return_to_go`, in [0, 1]; None means no `return_to_go`.

    Attributes:
      spaces: spaces of the data.
      report: report of the validator.
      episodes: place in the ring of each episode that is not held out, in the order of the sources.
      holdout: buffer of held-out episodes; None if there are none.

    Raises:
      UsageError: a source cannot be read, its episodes are faulty (see `policy`), or its spaces are not known.
    """

    def __init__(
        self,
        sources: Sequence[str | EpisodeSource] = gin.REQUIRED,
        length: Annotated[int, Range(2)] | None = None,
        policy: Literal["raise", "drop_episode", "warn"] = "raise",
        env_id: Any = None,
        spaces: Spaces = NO_SPACES,
        top_fraction: Rate = 1.0,
        holdout_fraction: Annotated[float, Range(0, 1, below=True)] = 0.0,
        num_columns: PositiveInt = 8,
        action_limit: Rate = 1 - 1e-5,
        device: torch.device | str = "cpu",
        directory: str | Path | None = None,
        keeps_episodes: bool = False,
        return_gamma: UnitInterval | None = None,
    ):
        environment, reward = (spaces, None) if env_id is None else spaces_of(env_id)
        reading = SourceReading(sources, environment, reward, policy)
        if None in reading.spaces:
            raise UsageError(
                f"{reading.report.name} does not declare the spaces that it was recorded in; give the environment with "
                "OfflineBuffer.env_id"
            )
        episodes, held_out = selected(reading, length, top_fraction, holdout_fraction)
        settings = reading.spaces, num_columns, action_limit, device
        asked: dict[str, Any] = {"keeps_episodes": keeps_episodes, "return_gamma": return_gamma}
        self.holdout: EpisodeBuffer | None = None
        if held_out:
            held_directory = None if directory is None else Path(directory) / "holdout"
            self.holdout = EpisodeBuffer(held_out, *settings, held_directory, **asked)
        super().__init__(episodes, *settings, directory, **asked)
        self.spaces, self.report = reading.spaces, reading.report
        self._fingerprint: str | None = None

    def check_spaces(self, observation_space: Any, action_space: Any) -> None:
        """Checks that the data fit an environment with the given spaces.

        Raises:
          UsageError: the data do not fit; the message names both spaces.
        """
        check_fit(self.spaces, Spaces(observation_space, action_space), self.report.name)

    def check_rewards(self, num_entries: int) -> None:
        """Raises UsageError if rewards do not have `num_entries` entries; 0 means scalar rewards."""
        rows = self._store.rows
        assert rows is not None
        found = sum(rows.reward.shape[1:])
        check_rewards(found, num_entries, self.report.name)

    def state_dict(self) -> dict[str, Any]:
        """Returns a checksum of the data, with which a resumed run recognises the data. Rows are not saved."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for episode in self.episodes:
                position = torch.arange(episode.position, episode.position + episode.length + 1)
                read = self.read(torch.tensor([episode.column]), position[:, None])._replace(return_to_go=None)
                for leaf in nest.leaves(read):
                    digest.update(leaf.cpu().numpy().tobytes())
            self._fingerprint = digest.hexdigest()
        return {"num_rows": self.num_rows, "num_columns": self.num_envs, "sha256": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checks that `state` was saved with the same data.

        Raises:
          UsageError: the data are different.
        """
        here = self.state_dict()
        if state != here:
            raise UsageError(
                f"{self.report.name} has {here['num_rows']:,} rows in {here['num_columns']} columns, but the run was "
                f"saved with {state['num_rows']:,} rows in {state['num_columns']} columns, or with other rows; restore "
                "the data, or start a new run in another directory"
            )


def _taken(left: list[Episode | None], column: list[int]) -> Iterator[Episode]:
    """Yields the episodes of a column, and removes them from `left` to free memory."""
    for i in column:
        episode, left[i] = left[i], None
        assert episode is not None
        yield episode


class _RowReader:
    """Reads a given number of rows at a time from consecutive episodes."""

    def __init__(self, episodes: Iterator[Episode]):
        self._episodes = episodes
        self._left: list[np.ndarray] = []  # leaves of the current episode's unread rows

    def read_into(self, target: Nest, encoder: EpisodeEncoder) -> None:
        """Writes the next rows into `target`, leaves `[count, ...]`. If fewer rows are left, its last entries stay."""
        leaves = nest.leaves(target._replace(time_step=target.time_step._replace(env_id=None)))
        done, count = 0, len(leaves[0])
        while done < count:
            if not self._left:
                episode = next(self._episodes, None)
                if episode is None:
                    return
                rows = encoder.rows(episode)
                self._left = nest.leaves(rows._replace(time_step=rows.time_step._replace(env_id=None)))  # type: ignore[arg-type]
            taken = min(count - done, len(self._left[0]))
            for leaf, source in zip(leaves, self._left, strict=True):
                leaf[done : done + taken] = source[:taken]
            self._left = [] if taken == len(self._left[0]) else [source[taken:] for source in self._left]
            done += taken


def packed_columns(sizes: Sequence[int], num_columns: int) -> list[list[int]]:
    """Distributes items over columns: each item, largest first, goes to the column with the smallest total size.

    Args:
      sizes: sizes of the items; at least one item.
      num_columns: maximum number of columns; no column stays empty.

    Returns:
      Indices of each column's items, in the order in which they were placed.
    """
    columns: list[list[int]] = [[] for _ in range(min(num_columns, len(sizes)))]
    filled = np.zeros(len(columns), np.int64)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        column = int(filled.argmin())
        columns[column].append(i)
        filled[column] += sizes[i]
    return columns


def _stored(episodes: list[Episode], columns: list[list[int]]) -> list[StoredEpisode]:
    """Returns the place of each episode in the ring, in the order of `episodes`."""
    found: dict[int, StoredEpisode] = {}
    for column, members in enumerate(columns):
        position = 0
        for i in members:
            episode = episodes[i]
            return_ = float(episode.rewards.sum(dtype=np.float64))
            found[i] = StoredEpisode(episode.id, column, position, episode.length, return_)
            position += episode.length + 1
    return [found[i] for i in range(len(episodes))]
