"""LeRobot's directories: `meta/info.json` and `data/chunk-*/*.parquet`, one row for each frame.

Needs the extra 'arrow'. An episode has no observation after its last frame. That frame becomes the final observation,
its action and reward are dropped, and the episode is truncated. Films are not read. Several `observation.*` columns
become a dict with the names after the dot; a single one becomes the observation. The format declares no spaces.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable, without_final_observation
from alfish.offline.sources.files import check_regular, existing_directory, extra, read_json, said
from alfish.offline.sources.limits import NotEnoughMemory, check_expansion, check_memory, stored_values
from alfish.offline.spaces import NO_SPACES, Spaces

NUMBER_BYTES = 8
FRAMES = "frame_index"
IMAGES = ("video", "image")


class LeRobotSource(EpisodeSource):
    """Reads the episodes of `lerobot:directory`.

    Args:
      where: the data set's directory, which holds `meta` and `data`.
      environment: not used.

    Raises:
      UsageError: the directory does not exist, or lacks a part.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        what = "a LeRobot data set"
        self._parquet = extra("pyarrow.parquet", "arrow", what)
        root = existing_directory(where, what)
        self._files = sorted((root / "data").glob("**/*.parquet"))
        try:
            info = read_json(root / "meta" / "info.json")
            features = {name: dict(feature) for name, feature in info["features"].items()}
        except UsageError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"{where} is not {what}: meta/info.json does not say its features ({said(error)})"
            ) from error
        super().__init__(f"lerobot:{where}")
        if not self._files:
            raise UsageError(f"{where} is not {what}: there is no data/**/*.parquet")
        seen = [name for name in features if name.startswith("observation.") or name == "observation"]
        images = [name for name in seen if features[name].get("dtype") in IMAGES]
        self._observations = [name for name in seen if name not in images]
        self._shapes = {name: tuple(feature.get("shape") or ()) for name, feature in features.items()}
        if not self._observations or "action" not in features:
            raise UsageError(
                f"{where} has no action or no observation.* that is not a film; it has {', '.join(features)}"
            )
        if images:
            self.note(f"films are not read: {', '.join(images)}")
        self._has_rewards = "next.reward" in features
        if not self._has_rewards:
            self.note("there is no next.reward: all rewards are 0, which is enough to imitate")
        self.note(
            "an episode's last frame is its final observation: the action and the reward that stand there are dropped"
        )

    def episodes(self) -> Iterator[Episode | Unreadable]:
        columns = [*self._observations, "action", "episode_index", *(["next.reward"] if self._has_rewards else [])]
        unread = Table({}, 0)  # rows of the episode that may continue in the next file
        for path in self._files:
            try:
                table = self._read(path, columns)
            except NotEnoughMemory:
                raise
            except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
                if unread.length:  # rows after a lost file do not continue these
                    yield self._episode(unread)
                    unread = Table({}, 0)
                readable = len(self._files) - 1
                yield Unreadable(path.name, f"{path} ({said(error)}); {readable} other files of the data set are there")
                continue
            if not table.length:
                continue
            unread = unread.then(table)
            index = unread.columns["episode_index"]
            begins = np.flatnonzero(np.diff(index, prepend=index[:1] - 1))
            begins = begins.tolist()
            for start, stop in zip(begins, begins[1:]):
                yield self._episode(unread.part(start, stop))
            unread = unread.part(begins[-1], len(index)) if begins else unread
        if unread.length:
            yield self._episode(unread)

    def _read(self, path: Path, columns: list[str]) -> "Table":
        check_regular(path)
        with self._parquet.ParquetFile(path) as file:
            sizes = [math.prod(self._shapes.get(name, ())) for name in columns]
            stored = sum(values for path, values in stored_values(file.metadata) if path.split(".list")[0] in columns)
            declared = NUMBER_BYTES * max(stored, file.metadata.num_rows * max(1, sum(sizes)))
            check_expansion(declared, path.stat().st_size, str(path))
            check_memory(declared, str(path))
            columns = [*columns, *([FRAMES] if FRAMES in file.schema_arrow.names else [])]
            table = file.read(columns)
        arrays = {name: _array(table.column(name), self._shapes.get(name, ())) for name in columns}
        return Table(arrays, table.num_rows)

    def _episode(self, table: "Table") -> Episode | Unreadable:
        of, length = table.columns, table.length
        id, frames = str(of["episode_index"][0]), of.get(FRAMES)
        if frames is not None:
            gaps = np.flatnonzero(np.diff(frames) != 1)
            if len(gaps):
                before, after = frames[gaps[0] : gaps[0] + 2]
                return Unreadable(id, f"frames are missing or out of order: {FRAMES} goes from {before} to {after}")
            if frames[0] != 0:
                self.warn(
                    f"episode {id} begins with frame {frames[0]}: the frames before are missing, the rest is kept"
                )
        observations: Nest = {name.partition(".")[2]: of[name] for name in self._observations}
        if len(observations) == 1:
            observations = next(iter(observations.values()))
        rewards = of["next.reward"] if self._has_rewards else np.zeros(length, np.float32)
        never = np.zeros(length, bool)
        return without_final_observation(id, observations, of["action"], rewards, never, never)


class Table:
    """Rows with several columns."""

    def __init__(self, columns: dict[str, np.ndarray], length: int):
        self.columns, self.length = columns, length

    def then(self, other: "Table") -> "Table":
        """Returns these rows followed by the other's."""
        if not self.length:
            return other
        return Table(
            nest.map(lambda a, b: np.concatenate([a, b]), self.columns, other.columns), self.length + other.length
        )

    def part(self, start: int, stop: int) -> "Table":
        """Returns the rows from `start` to before `stop`."""
        return Table(nest.at(self.columns, slice(start, stop)), stop - start)


def _array(column: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a column of numbers, or of nested lists of them, as `[N, *shape]`."""
    count, column = len(column), column.combine_chunks()
    if column.null_count:
        raise ValueError(f"{column.null_count} values are missing")
    sizes: list[int] = []  # of the lists at each depth
    while hasattr(column, "flatten") and "list" in str(column.type):
        lengths = (
            set(column.value_lengths().to_pylist()) if hasattr(column, "value_lengths") else {column.type.list_size}
        )
        if len(lengths) > 1:
            raise ValueError(
                f"its lists have from {min(lengths)} to {max(lengths)} entries, and {list(shape)} is declared"
            )
        sizes += lengths
        column = column.flatten()
    values = np.asarray(column.to_numpy(zero_copy_only=False))
    if len(sizes) > 1 and tuple(sizes) != shape:
        raise ValueError(f"its lists are of shape {sizes}, and {list(shape)} is declared")
    return values.reshape(count, *shape) if sizes else values
