"""Named arrays in one .npz file: the simplest door in.

Either whole episodes, one after the other:

    lengths         [E] the transitions of each episode
    observations    [sum of (length + 1), ...]
    actions         [sum of lengths, ...]
    rewards         [sum of lengths]
    terminated      [sum of lengths], or [E]: whether the episode terminated
    truncated       the same; may be left out

or a table of N transitions:

    observations, actions, rewards, terminated, truncated    [N, ...]; truncated may be left out
    next_observations                                        [N, ...]; may be left out, see D4RL

A nest is several arrays: `observations/camera`, `observations/speed` are a dict.
"""

import contextlib
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
from alfish.offline.sources.files import existing_file, missing
from alfish.offline.spaces import NO_SPACES, Spaces

NEEDED = ("observations", "actions", "rewards", "terminated")
KNOWN = (*NEEDED, "truncated", "next_observations", "lengths")


class NpzSource(EpisodeSource):
    """Episodes of `npz:file.npz`.

    Args:
      where: the file.
      environment: not used.

    Raises:
      UsageError: there is no such file, it is damaged, or names are missing or not known.
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
        lengths = parts.pop("lengths")
        if lengths is None:
            yield from self._of_table(flat.Table(**{name: parts[name] for name in flat.Table._fields}))
        else:
            yield from self._of_episodes(lengths, parts)

    def _of_table(self, table: flat.Table) -> Iterator[Episode | Unreadable]:
        flags = (None if of is None else np.asarray(of).reshape(-1).astype(bool) for of in table[3:5])
        terminated, truncated = flags
        assert terminated is not None
        table = table._replace(terminated=terminated, truncated=truncated)
        flat.check_lengths(table, self.name)
        cuts, num_unmarked = flat.cut(table)
        for sentence in flat.notes(table, num_unmarked):
            self.note(sentence)
        yield from flat.episodes(table, cuts)

    def _of_episodes(self, lengths: np.ndarray, parts: dict[str, Any]) -> Iterator[Episode]:
        if parts["next_observations"] is not None:
            raise UsageError(f"{self.name} has lengths and next_observations; with lengths, observations hold them")
        count = int(lengths.sum())
        needed = {"observations": count + len(lengths), "actions": count, "rewards": count}
        for name, expected in needed.items():
            for leaf in nest.leaves(parts[name]):
                if len(leaf) != expected:
                    raise UsageError(f"{self.name}: {name} has {len(leaf):,} rows, and by its lengths {expected:,}")
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

    def _flags(self, values: Any, name: str, number: int, rows: slice, num_episodes: int, count: int) -> np.ndarray:
        """An episode's flags `[T]`, of a file that has one an episode or one a transition."""
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
            try:
                arrays = np.load(file, allow_pickle=False)
            except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
                raise UsageError(
                    f"{self._path} is not a whole .npz file: nothing of its {self._path.stat().st_size:,} bytes is "
                    f"readable, since its table of contents stands at the end; write it again ({error})"
                ) from error
            if not isinstance(arrays, Mapping):
                raise UsageError(f"{self._path} is one array, and an .npz file of several is needed; use numpy.savez")
            yield arrays

    def _read(self, arrays: Any, name: str) -> Nest:
        found = [key for key in arrays if key == name or key.startswith(f"{name}/")]
        try:
            if found == [name]:
                return arrays[name]
            tree: dict[str, Any] = {}
            for key in found:
                *parents, leaf = key.split("/")[1:]
                place = tree
                for parent in parents:
                    place = place.setdefault(parent, {})
                place[leaf] = arrays[key]
            return tree or None
        except (ValueError, OSError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
            raise UsageError(
                f"{self._path}: {name} cannot be read ({error}); readable are arrays of numbers that nothing has "
                "damaged, no Python objects"
            ) from error
