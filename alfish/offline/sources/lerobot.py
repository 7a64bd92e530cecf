"""LeRobot's directories: `meta/info.json` and `data/chunk-*/*.parquet`, one row for each frame.

Needs the extra 'arrow'. An episode terminated if its last frame has both `next.done` and `next.success`. A terminated
episode keeps the reward of its last frame, and its last observation is used as the final observation. Any other episode
is truncated: its last frame becomes the final observation, and the action and reward of that frame are dropped. If a
frame follows the frame with `next.done`, it is the final observation in both cases. The indices and lengths of episodes
must agree with `meta`.

Videos are not read. Several `observation.*` columns become a dict with the names after the dot; a single such column
becomes the observation. The format declares no spaces.
"""

import json
import math
import operator
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alfish import nest
from alfish.errors import UsageError, counted, first_line, optional_module
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable, without_final_observation
from alfish.offline.limits import NotEnoughMemory, check_expansion, check_memory, stored_values
from alfish.offline.recorded_spaces import NO_SPACES, Spaces
from alfish.offline.sources import flat
from alfish.offline.sources.recognition import check_beginning, said_of_directory
from alfish.offline.sources.source_files import (
    JSON_EXPANSION,
    check_regular,
    existing_directory,
    read_json,
    said,
)

NUMBER_BYTES = 8
INDEX, FRAMES = "episode_index", "frame_index"
REWARD, DONE, SUCCESS = "next.reward", "next.done", "next.success"
IMAGES = ("video", "image")


class LeRobotSource(EpisodeSource):
    """Reads the episodes of `lerobot:directory`.

    Args:
      where: path of the data set's directory, which holds `meta` and `data`.
      environment: spaces of the environment, which are not used.
      dones: meaning of `next.done`, 'terminated' or 'truncated'; None means that `next.success` decides.

    Raises:
      UsageError: the directory does not exist, or lacks a part. While episodes are read: `meta` declares far more
        episodes than there are frames.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES, dones: str | None = None):
        what = "a LeRobot data set"
        self._parquet = optional_module("pyarrow.parquet", "arrow", what)
        self._root = root = existing_directory(where, what)
        self._files = sorted((root / "data").glob("**/*.parquet"))
        if not (root / "meta" / "info.json").exists():
            raise UsageError(f"{where} is not {what}: there is no meta/info.json; {said_of_directory(root)}")
        try:
            info = read_json(root / "meta" / "info.json")
            features = {name: dict(feature) for name, feature in info["features"].items()}
            totals = (info.get("total_episodes"), info.get("total_frames"))
            self._total, self._num_frames = (None if total is None else operator.index(total) for total in totals)
        except UsageError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"{where} is not {what}: meta/info.json does not declare its features and counts ({said(error)})"
            ) from error
        super().__init__(f"lerobot:{where}")
        if not self._files:
            raise UsageError(f"{where} is not {what}: there is no data/**/*.parquet")
        check_regular(self._files[0])
        check_beginning(self._files[0])  # a clone without Git LFS contains only pointers
        seen = [name for name in features if name.startswith("observation.") or name == "observation"]
        images = [name for name in seen if features[name].get("dtype") in IMAGES]
        self._observations = [name for name in seen if name not in images]
        self._shapes = {name: tuple(feature.get("shape") or ()) for name, feature in features.items()}
        if not self._observations or "action" not in features:
            raise UsageError(
                f"{where} has no action, or no observation.* other than videos; it has {', '.join(features)}"
            )
        self._present = [name for name in (REWARD, DONE, SUCCESS) if name in features]
        self._dones = dones
        if dones and DONE not in features:
            raise UsageError(f"{where} has no {DONE}, to which the option dones={dones} refers; leave the option out")
        if images:
            self.note(f"videos are not read: {', '.join(images)}")
        self._tell_what_is_dropped(where)

    def _tell_what_is_dropped(self, where: str) -> None:
        if REWARD not in self._present:
            self.note(f"there is no {REWARD}: all rewards are 0, which suffices for imitation")
        self.note(
            "where an episode did not terminate, its last frame is its final observation: the action and the reward of "
            "that frame are dropped"
        )
        if DONE in self._present and SUCCESS not in self._present and self._dones is None:
            self.warn(
                f"there is no {SUCCESS}, so {DONE} does not say whether an episode terminated or timed out: all count "
                f"as truncated; write lerobot:{where}?dones=terminated if episodes terminate, or ?dones=truncated"
            )

    def episodes(self) -> Iterator[Episode | Unreadable]:
        columns = [*self._observations, "action", INDEX, *self._present]
        faults, missing = self._faults()
        yield from (Unreadable(str(i), "it is not there") for i in missing)
        unread = ParquetTable({}, 0)  # rows of the episode that may continue in the next file
        for path in self._files:
            try:
                table = self._read(path, columns)
            except NotEnoughMemory:
                raise
            except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
                if unread.length:  # rows after a lost file do not continue these rows
                    yield self._episode(unread, faults)
                    unread = ParquetTable({}, 0)
                readable = len(self._files) - 1
                yield Unreadable(
                    path.name, f"{path} ({said(error)}); {readable} other files of the data set are present"
                )
                continue
            if not table.length:
                continue
            unread = unread.then(table)
            begins = _begins(unread.columns[INDEX])
            for start, stop in zip(begins, begins[1:]):
                yield self._episode(unread.part(start, stop), faults)
            unread = unread.part(begins[-1], unread.length)
        if unread.length:
            yield self._episode(unread, faults)

    def _faults(self) -> tuple[dict[int, str], list[int]]:
        """Returns the fault of each faulty episode by its index, and the list of the indices of missing episodes.

        Raises:
          UsageError: `meta` declares far more episodes than there are frames.
        """
        found = [np.zeros(0)]
        for path in self._files:
            try:
                found.append(self._read(path, [INDEX]).columns[INDEX].reshape(-1))
            # `episodes` reads the same file, and reports the error.
            except (OSError, ValueError, KeyError, TypeError, NotImplementedError):
                continue
        index = np.concatenate(found).astype(np.float64)
        places = Counter(int(value) for value in index[_begins(index)].tolist() if _is_index(value))
        counts = Counter(index.tolist())
        try:
            declared, by = self._lengths()
        except UsageError:
            raise
        except (OSError, ValueError, KeyError, TypeError, NotImplementedError) as error:
            raise UsageError(
                f"{self._root}/meta does not have the length of each episode ({type(error).__name__}: "
                f"{first_line(error)}); download the data set again"
            ) from error
        total = len(declared) if self._total is None else self._total
        if total > 2 * len(index) + 100:  # some frames may be lost
            raise UsageError(
                f"{self._root}/meta/info.json declares {total:,} episodes, but there are only {len(index):,} frames; "
                "download the data set again"
            )
        if self._num_frames not in (None, len(index)):
            self.warn(f"meta/info.json declares {self._num_frames:,} frames, but there are {len(index):,}")
        faults: dict[int, str] = {}
        for i, count in places.items():
            if count > 1:
                faults[i] = f"its frames are not contiguous: its {INDEX} appears in {count} places"
            elif i >= total and (declared or self._total is not None):
                faults[i] = f"meta/info.json declares {counted(total, 'episode')}, numbered from 0"
            elif declared.get(i, counts[i]) != counts[i]:
                faults[i] = f"it has {counted(counts[i], 'frame')}, but {by} declares {declared[i]:,}"
        return faults, [i for i in range(total) if i not in places]

    def _lengths(self) -> tuple[dict[int, int], str]:
        """Returns the lengths that `meta` declares, by index of the episode, and the name of the declaring file."""
        meta = self._root / "meta"
        if (lines := meta / "episodes.jsonl").exists():
            check_regular(lines)
            check_memory(JSON_EXPANSION * lines.stat().st_size, str(lines))
            read = [json.loads(line) for line in lines.read_text("utf-8").splitlines() if line.strip()]
            return {int(line[INDEX]): int(line["length"]) for line in read if "length" in line}, "meta/episodes.jsonl"
        found: dict[int, int] = {}
        for path in sorted((meta / "episodes").glob("**/*.parquet")):
            columns = self._read(path, [INDEX, "length"]).columns
            found |= dict(zip(columns[INDEX].tolist(), columns["length"].tolist()))
        return found, "meta/episodes"

    def _read(self, path: Path, columns: list[str]) -> "ParquetTable":
        check_regular(path)
        check_beginning(path)
        with self._parquet.ParquetFile(path) as file:
            sizes = [math.prod(self._shapes.get(name, ())) for name in columns]
            stored = sum(values for path, values in stored_values(file.metadata) if path.split(".list")[0] in columns)
            declared = NUMBER_BYTES * max(stored, file.metadata.num_rows * max(1, sum(sizes)))
            check_expansion(declared, path.stat().st_size, str(path))
            check_memory(declared, str(path))
            columns = [*columns, *([FRAMES] if FRAMES in file.schema_arrow.names else [])]
            table = file.read(columns)
        arrays = {name: _array(table.column(name), self._shapes.get(name, ())) for name in columns}
        return ParquetTable(arrays, table.num_rows)

    def _episode(self, table: "ParquetTable", faults: dict[int, str]) -> Episode | Unreadable:
        of, length = table.columns, table.length
        index, frames = float(of[INDEX].flat[0]), of.get(FRAMES)
        if not _is_index(index):
            return Unreadable(f"{index:g}", f"{INDEX} is {index:g}, but an integer of at least 0 is expected")
        id = str(int(index))
        if int(index) in faults:
            return Unreadable(id, faults[int(index)])
        if frames is not None:
            gaps = np.flatnonzero(np.diff(frames) != 1)
            if len(gaps):
                before, after = frames[gaps[0] : gaps[0] + 2]
                return Unreadable(id, f"frames are missing or out of order: {FRAMES} goes from {before} to {after}")
            if frames[0] != 0:
                self.warn(
                    f"episode {id} begins with frame {frames[0]}: the earlier frames are missing, and the remaining "
                    "frames are kept"
                )
        observations: Nest = {name.partition(".")[2]: of[name] for name in self._observations}
        if len(observations) == 1:
            observations = next(iter(observations.values()))
        rewards = of[REWARD] if REWARD in of else np.zeros(length, np.float32)
        done, terminated = self._ends(of, length)
        truncated = done & ~terminated
        if length > 1 and done[-2]:
            steps = slice(length - 1)  # the last frame follows the end
            return Episode(id, observations, of["action"][steps], rewards[steps], terminated[steps], truncated[steps])
        if not terminated[-1] and rewards[-1].any() and not rewards[:-1].any():
            self.warn(
                "truncated episodes lose their only reward, because their last step is dropped; write "
                f"lerobot:{self._root}?dones=terminated if this reward ended them"
            )
        return without_final_observation(id, observations, of["action"], rewards, terminated, truncated)

    def _ends(self, of: dict[str, np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns masks `[length]` of the frames at which the episode is done, and at which it terminated."""
        done = np.zeros(length, bool)
        done[-1] = True  # without the column `next.done`, only the last frame is an end
        if DONE in of:
            done = flat.flags(of[DONE], f"{self.name}: {DONE}")
        if self._dones is not None:
            return done, done & (self._dones == "terminated")
        if SUCCESS not in of:
            return done, done & False
        return done, done & flat.flags(of[SUCCESS], f"{self.name}: {SUCCESS}")


class ParquetTable:
    """Rows of a parquet file: one array `[length, ...]` for each column."""

    def __init__(self, columns: dict[str, np.ndarray], length: int):
        self.columns, self.length = columns, length

    def then(self, other: "ParquetTable") -> "ParquetTable":
        """Returns the rows of this table, followed by the rows of `other`."""
        if not self.length:
            return other
        return ParquetTable(
            nest.map(lambda a, b: np.concatenate([a, b]), self.columns, other.columns), self.length + other.length
        )

    def part(self, start: int, stop: int) -> "ParquetTable":
        """Returns the rows from `start` (inclusive) to `stop` (exclusive)."""
        return ParquetTable(nest.at(self.columns, slice(start, stop)), stop - start)


def _is_index(value: float) -> bool:
    return value >= 0 and value.is_integer()


def _begins(index: np.ndarray) -> list[int]:
    """Returns the rows at which a new episode begins."""
    index = index.reshape(-1)
    return [0, *(np.flatnonzero(index[1:] != index[:-1]) + 1).tolist()] if len(index) else []


def _array(column: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a column of numbers, or of nested lists of numbers, as `[N, *shape]`."""
    count, column = len(column), column.combine_chunks()
    if column.null_count:
        raise ValueError(f"{column.null_count} values are missing")
    sizes: list[int] = []  # lengths of the lists at each depth
    while hasattr(column, "flatten") and "list" in str(column.type):
        lengths = (
            set(column.value_lengths().to_pylist()) if hasattr(column, "value_lengths") else {column.type.list_size}
        )
        if len(lengths) > 1:
            raise ValueError(f"its lists have {min(lengths)} to {max(lengths)} entries, but {list(shape)} is declared")
        sizes += lengths
        column = column.flatten()
    values = np.asarray(column.to_numpy(zero_copy_only=False))
    if len(sizes) > 1 and tuple(sizes) != shape:
        raise ValueError(f"its lists have shape {sizes}, but {list(shape)} is declared")
    return values.reshape(count, *shape) if sizes else values
