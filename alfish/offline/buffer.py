"""Rows of the stream that were made elsewhere: read once, and never written again."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn

import gin
import numpy as np
import torch
from absl import logging

from alfish import nest
from alfish.data import Experience, StepType
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource
from alfish.offline.reading import Reading
from alfish.offline.rows import RowMaker
from alfish.offline.spaces import NO_SPACES, Spaces, check_fit, spaces_of
from alfish.parameters import PositiveInt, Range, Rate, UnitInterval, checked
from alfish.replay import RingBuffer, RingView

PUSHED_ROWS = 4096  # of each column at a time


class Stored(NamedTuple):
    """Where an episode is kept: rows `position` to `position + length` of `column`, both included."""

    id: str
    column: int
    position: int
    length: int  # transitions
    return_: float  # undiscounted


class EpisodeBuffer(RingBuffer):
    """Episodes as a ring that is full for ever: windows are drawn from it as from replay's.

    Episodes lie one behind another in the columns, the longest first, each on the column that is then the shortest. A
    column is no environment that acted, so `env_id` is its number and no more.

    Args:
      episodes: validated; the list is emptied, so that memory moves from the episodes to the ring.
      spaces: of the episodes.
      num_columns, action_limit, device, directory, keeps_episodes, return_gamma: as for `OfflineBuffer`.

    Attributes:
      episodes: where each one is kept, in the given order.
    """

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
        self._fill(episodes, columns, RowMaker(spaces, action_limit))

    def push(self, experience: Experience) -> NoReturn:
        """Raises TypeError: nothing is added to what was recorded."""
        raise TypeError("an OfflineBuffer is read only; push to a RingBuffer of its own")

    def clear(self) -> NoReturn:
        """Raises TypeError: nothing of what was recorded is forgotten."""
        raise TypeError("an OfflineBuffer is read only")

    def start_range(self, window_length: int, newest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Where windows may start, as if all had two rows: no more come, and a column's last transitions count too."""
        return super().start_range(2, newest)

    def in_place(self, window_length: int) -> RingView | None:
        """Not of windows of more than two rows, which go on behind the end of a column, where no rows lie."""
        return super().in_place(window_length) if window_length == 2 else None

    def _read(self, column: np.ndarray, position: np.ndarray) -> Experience:
        """The rows at these places; behind the end of a column its LAST row repeats, which trains nothing."""
        return super()._read(column, np.minimum(position, self._ends[column] - 1))

    def _fill(self, kept: list[Episode], columns: list[list[int]], maker: RowMaker) -> None:
        """Pushes every column's rows, and PAD behind the shorter ones; takes the episodes out of `kept`."""
        example = maker.rows(kept[0])
        left: list[Episode | None] = list(kept)
        kept.clear()  # so that memory moves from the episodes to the ring
        streams = [_Stream(_taken(left, column)) for column in columns]

        def empty(count: int) -> Experience:
            rows = nest.map(lambda leaf: np.zeros((count, len(columns), *leaf.shape[1:]), leaf.dtype), example)
            rows.time_step.step_type[:] = StepType.PAD
            rows.time_step.env_id[:] = np.arange(len(columns))
            return rows

        for start in range(0, self.length, PUSHED_ROWS):
            rows = empty(min(PUSHED_ROWS, self.length - start))
            for b, stream in enumerate(streams):
                stream.write(nest.at(rows, (slice(None), b)), maker)
            super().push(nest.map(torch.from_numpy, rows))


@gin.configurable(module="alfish.offline")
@checked
class OfflineBuffer(EpisodeBuffer):
    """Episodes of several sources as a ring, see `EpisodeBuffer`.

    Args:
      sources: `scheme:where`, see `alfish.offline.sources`; or sources themselves.
      length: rows kept, an episode of T transitions being T+1; episodes that come after do not fit, and are reported.
        None: all.
      policy: what to do with episodes that are not right: 'raise', 'drop_episode' or 'warn', see `Validator`.
      env_id: of the environment that the data must fit; needed where a source declares no spaces.
      spaces: the same for who has the spaces at hand.
      top_share: of the episodes, those with the greatest returns are kept, at least one; 1: all.
      holdout_fraction: of the episodes, spread over the sources' order, that go into `holdout` and are not trained on.
      num_columns: at most.
      action_limit: greatest magnitude of the Box actions that are trained on, in [-1, 1]: at the bounds themselves a
        tanh policy has infinite log-probability. `prev_action` is what was executed.
      device: where rows are kept, and windows come out.
      directory: keep the rows in memory-mapped files there instead, on the CPU.
      keeps_episodes: know where each row's episode begins and ends.
      return_gamma: discount per environment step of the `return_to_go` that rows then come with; None: there are none.

    Attributes:
      spaces: of the data, for comparison with an environment's.
      report: the validator's.
      episodes: where each one is kept, in the sources' order.
      holdout: a buffer of the episodes held out; None: there are none.

    Raises:
      UsageError: a source cannot be read, or its episodes are not right (`policy`); nobody says what spaces it is of.
    """

    def __init__(
        self,
        sources: Sequence[str | EpisodeSource] = gin.REQUIRED,
        length: Annotated[int, Range(2)] | None = None,
        policy: Literal["raise", "drop_episode", "warn"] = "raise",
        env_id: Any = None,
        spaces: Spaces = NO_SPACES,
        top_share: Rate = 1.0,
        holdout_fraction: Annotated[float, Range(0, 1, below=True)] = 0.0,
        num_columns: PositiveInt = 8,
        action_limit: Rate = 1 - 1e-5,
        device: torch.device | str = "cpu",
        directory: str | Path | None = None,
        keeps_episodes: bool = False,
        return_gamma: UnitInterval | None = None,
    ):
        reading = Reading(sources, spaces_of(env_id) if env_id is not None else spaces, policy)
        if None in reading.spaces:
            raise UsageError(
                f"{reading.report.name} does not declare the spaces that it was recorded in; name the environment with "
                "OfflineBuffer.env_id"
            )
        kept = _best(_fitting(reading, length), top_share)
        kept, held = _split(kept, holdout_fraction, reading.report.name)
        settings = reading.spaces, num_columns, action_limit, device
        asked: dict[str, Any] = {"keeps_episodes": keeps_episodes, "return_gamma": return_gamma}
        self.holdout: EpisodeBuffer | None = None
        if held:
            held_directory = None if directory is None else Path(directory) / "holdout"
            self.holdout = EpisodeBuffer(held, *settings, held_directory, **asked)
        super().__init__(kept, *settings, directory, **asked)
        self.spaces, self.report = reading.spaces, reading.report
        self._fingerprint: str | None = None

    def check_spaces(self, observation_space: Any, action_space: Any) -> None:
        """Raises where the data are not of an environment with these spaces.

        Raises:
          UsageError: names both.
        """
        check_fit(self.spaces, Spaces(observation_space, action_space), self.report.name)

    def state_dict(self) -> dict[str, Any]:
        """What tells that a resumed run reads the same data: the data themselves are in their files."""
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
        """Checks that the data are what they were.

        Raises:
          UsageError: they are not.
        """
        here = self.state_dict()
        if state != here:
            raise UsageError(
                f"{self.report.name} now has {here['num_rows']:,} rows in {here['num_columns']} columns, and the run "
                f"was saved with {state['num_rows']:,} in {state['num_columns']}, or with others; put the data "
                "back, or start anew in another directory"
            )


def _fitting(reading: Reading, length: int | None) -> list[Episode]:
    """The first episodes that are no more than `length` rows together."""
    kept: list[Episode] = []
    left_out: list[str] = []
    num_rows = 0
    for episode in reading:
        if left_out or (length is not None and num_rows + episode.length + 1 > length):
            left_out.append(episode.id)
        else:
            kept.append(episode)
            num_rows += episode.length + 1
    for id in left_out:
        reading.report.add("warning", f"it does not fit in OfflineBuffer.length = {length:,} rows, and is left out", id)
    if not kept:
        raise UsageError(
            f"OfflineBuffer.length is {length}, and the first episode of {reading.report.name} has more rows; raise it"
        )
    for level in ("warning", "mended"):
        if reading.report.found(level):
            logging.warning("%s: %s", reading.report.name, reading.report.sentences(level))
    return kept


def _best(episodes: list[Episode], share: float) -> list[Episode]:
    """The episodes with the greatest undiscounted returns, in their order."""
    number = max(1, round(share * len(episodes)))
    returns = np.array([episode.rewards.sum(dtype=np.float64) for episode in episodes])
    return [episodes[i] for i in sorted(np.argsort(-returns, kind="stable")[:number])]


def _split(episodes: list[Episode], share: float, name: str) -> tuple[list[Episode], list[Episode]]:
    """The episodes to train on, and those held out, which stand at even distances."""
    number = math.ceil(share * len(episodes))
    if number and number >= len(episodes):
        raise UsageError(
            f"OfflineBuffer.holdout_fraction is {share}, and {name} has {len(episodes)} episodes to split; lower it"
        )
    held = {int((k + 0.5) * len(episodes) / number) for k in range(number)}
    return [e for i, e in enumerate(episodes) if i not in held], [episodes[i] for i in sorted(held)]


def _taken(left: list[Episode | None], column: list[int]) -> Iterator[Episode]:
    """Episodes of a column, each of which its reader alone then holds."""
    for i in column:
        episode, left[i] = left[i], None
        assert episode is not None
        yield episode


class _Stream:
    """The rows of some episodes, taken a few at a time."""

    def __init__(self, episodes: Iterator[Episode]):
        self._episodes = episodes
        self._left: list[np.ndarray] = []  # leaves of the rows that the next call begins with

    def write(self, target: Nest, maker: RowMaker) -> None:
        """The next rows into leaves `[count, ...]`; fewer where there are no more."""
        leaves = nest.leaves(target._replace(time_step=target.time_step._replace(env_id=None)))
        done, count = 0, len(leaves[0])
        while done < count:
            if not self._left:
                episode = next(self._episodes, None)
                if episode is None:
                    return
                rows = maker.rows(episode)
                self._left = nest.leaves(rows._replace(time_step=rows.time_step._replace(env_id=None)))  # type: ignore[arg-type]
            taken = min(count - done, len(self._left[0]))
            for leaf, source in zip(leaves, self._left, strict=True):
                leaf[done : done + taken] = source[:taken]
            self._left = [] if taken == len(self._left[0]) else [source[taken:] for source in self._left]
            done += taken


def packed_columns(sizes: Sequence[int], num_columns: int) -> list[list[int]]:
    """Which of some items go into which column: the largest first, each into the column that holds least.

    Args:
      sizes: of the items; at least one.
      num_columns: at most; none stays empty.

    Returns:
      Indices of the items of each column, in the order in which they were put there.
    """
    columns: list[list[int]] = [[] for _ in range(min(num_columns, len(sizes)))]
    filled = np.zeros(len(columns), np.int64)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        column = int(filled.argmin())
        columns[column].append(i)
        filled[column] += sizes[i]
    return columns


def _stored(kept: list[Episode], columns: list[list[int]]) -> list[Stored]:
    """Where each episode is kept, in the order of the episodes."""
    found: dict[int, Stored] = {}
    for column, members in enumerate(columns):
        position = 0
        for i in members:
            episode = kept[i]
            return_ = float(episode.rewards.sum(dtype=np.float64))
            found[i] = Stored(episode.id, column, position, episode.length, return_)
            position += episode.length + 1
    return [found[i] for i in range(len(kept))]
