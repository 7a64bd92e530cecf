"""Named arrays in one .npz file: the simplest format.

The arrays are either whole episodes, one after the other:

    lengths         [E] number of transitions of each episode
    observations    [sum of (length + 1), ...]
    actions         [sum of lengths, ...]
    rewards         [sum of lengths]
    terminated      [sum of lengths], or [E]: whether the episode terminated
    truncated       the same; may be left out

or a table of N transitions:

    observations, actions, rewards, terminated, truncated    [N, ...]; truncated may be left out
    next_observations                                        [N, ...]; may be left out, see D4RL

A nest consists of several arrays: `observations/camera` and `observations/speed` become a dict.
"""

import contextlib
import itertools
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable, ends
from alfish.offline.sources import flat
from alfish.offline.sources.files import check_zip, existing_file, missing, said
from alfish.offline.spaces import NO_SPACES, Spaces

NEEDED = ("observations", "actions", "rewards", "terminated")
KNOWN = (*NEEDED, "truncated", "next_observations", "lengths")
NESTS = ("observations", "actions", "next_observations")


class NpzSource(EpisodeSource):
    """Reads the episodes of `npz:file.npz`.

    Args:
      where: the file.
      environment: not used.

    Raises:
      UsageError: the file does not exist or is damaged, or names are missing or unknown.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        self._path = existing_file(where, "an .npz file")
        super().__init__(f"npz:{where}")
        with self._open() as arrays:
            names = {name.partition("/")[0] for name in arrays}
        lacking, unknown = missing(names, NEEDED), sorted(names - {*KNOWN})
        if lacking or unknown:
            wrong = [f"no {name}" for name in lacking] + [f"{name}, which is not read" for name in unknown]
            raise UsageError(f"{where} has {'; '.join(wrong)}: its arrays are to be named {', '.join(KNOWN)}")

    def episodes(self) -> Iterator[Episode | Unreadable]:
        with self._open() as arrays:
            parts: dict[str, Any] = {name: self._read(arrays, name) for name in KNOWN}
        for name in ("terminated", "truncated"):
            if parts[name] is not None:
                parts[name] = flat.flags(parts[name], f"{self.name}: {name}")
        lengths = parts.pop("lengths")
        if lengths is None:
            yield from self._of_table(flat.Table(**{name: parts[name] for name in flat.Table._fields}))
        else:
            yield from self._of_episodes(lengths, parts)

    def _of_table(self, table: flat.Table) -> Iterator[Episode | Unreadable]:
        flat.check_shapes(table, self.name)
        cuts, num_unmarked = flat.cut(table)
        for sentence in flat.notes(table, num_unmarked):
            self.note(sentence)
        for sentence in flat.warnings(table, "truncated"):
            self.warn(sentence)
        yield from flat.episodes(table, cuts)

    def _of_episodes(self, lengths: np.ndarray, parts: dict[str, Any]) -> Iterator[Episode]:
        if parts["next_observations"] is not None:
            raise UsageError(f"{self.name} has lengths and next_observations; with lengths, observations hold them")
        self._check_lengths(lengths)
        count = sum(map(int, lengths))  # numpy's sum would overflow
        needed = {"observations": count + len(lengths), "actions": count, "rewards": count}
        for name, expected in needed.items():
            for label, leaf in nest.named_leaves(parts[name], name):
                flat.check_rows(leaf, f"{self.name}: {label}")
                if len(leaf) != expected:
                    raise UsageError(f"{self.name}: {label} has {len(leaf):,} rows, and by its lengths {expected:,}")
        start = 0
        for number, length in enumerate(map(int, lengths)):
            rows, seen = slice(start, start + length), slice(start + number, start + number + length + 1)
            flags = [
                self._flags(parts[name], name, number, rows, len(lengths), count)
                for name in ("terminated", "truncated")
            ]
            yield Episode(
                str(number),
                nest.at(parts["observations"], seen),
                nest.at(parts["actions"], rows),
                parts["rewards"][rows],
                *flags,
            )
            start += length

    def _check_lengths(self, lengths: np.ndarray) -> None:
        if lengths.ndim != 1:
            raise UsageError(
                f"{self.name}: lengths has shape {list(lengths.shape)}, and [E], a number for each episode, is expected"
            )
        if lengths.dtype.kind not in "iu":
            raise UsageError(f"{self.name}: lengths is of dtype {lengths.dtype}, and whole numbers are expected")
        if (lengths < 0).any():
            raise UsageError(f"{self.name}: lengths holds {lengths.min()}, and a number of transitions is 0 or more")

    def _flags(self, values: Any, name: str, number: int, rows: slice, num_episodes: int, count: int) -> np.ndarray:
        """Returns an episode's flags `[T]`; the file has one for each episode, or one for each transition."""
        length = rows.stop - rows.start
        if values is None:
            return np.zeros(length, bool)
        if len(values) == num_episodes != count:
            return ends(length, values[number], False)[0]
        if len(values) != count:
            raise UsageError(f"{self.name}: {name} has {len(values):,} rows, neither {num_episodes:,} nor {count:,}")
        return values[rows]

    @contextlib.contextmanager
    def _open(self) -> Iterator[Mapping[str, Any]]:
        with open(self._path, "rb") as file:
            begin = file.read(6)
            file.seek(0)
            if begin == b"\x93NUMPY":
                raise UsageError(f"{self._path} is one array, and an .npz file of several is needed; use numpy.savez")
            if begin[:2] != b"PK":  # as every zip file begins
                raise UsageError(f"{self._path} is not an .npz file; write one with numpy.savez")
            check_zip(self._path)
            yield np.load(file, allow_pickle=False)

    def _read(self, arrays: Any, name: str) -> Nest:
        found = [key for key in arrays if key == name or key.startswith(f"{name}/")]
        if found and found != [name] and name not in NESTS:
            raise UsageError(f"{self._path} has {', '.join(found)}, and {name} is one array; write it under that name")
        for one, other in itertools.permutations(found, 2):
            if other.startswith(f"{one}/"):
                raise UsageError(f"{self._path} has {one} and {other}; write one of them under another name")
        try:
            if found == [name]:
                return np.asarray(arrays[name])
            tree: dict[str, Any] = {}
            for key in found:
                *parents, leaf = key.split("/")[1:]
                place = tree
                for parent in parents:
                    place = place.setdefault(parent, {})
                place[leaf] = np.asarray(arrays[key])
            return tree or None
        except (ValueError, OSError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
            why = "" if "allow_pickle" in str(error) else f" ({said(error)})"  # which is no remedy here
            raise UsageError(
                f"{self._path}: {name} cannot be read{why}; readable are arrays of numbers that nothing has damaged, "
                "no Python objects"
            ) from error
