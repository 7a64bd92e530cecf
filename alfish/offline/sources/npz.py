"""Named arrays in one .npz file, the simplest format.

The arrays are either whole episodes, one after the other:

    lengths         [E] number of transitions of each episode
    observations    [sum of (length + 1), ...]
    actions         [sum of lengths, ...]
    rewards         [sum of lengths]
    terminated      [sum of lengths], or [E]: whether the episode terminated
    truncated       the same; may be left out

or a table of N transitions:

    observations, actions, rewards, terminated, truncated    [N, ...]; truncated may be left out
    next_observations                                        [N, ...]; may be left out, see `flat`

A nest consists of several arrays: `observations/camera` and `observations/speed` become a dict.
"""

import contextlib
import itertools
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from alfish import nest
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable, ends
from alfish.offline.limits import check_memory
from alfish.offline.recorded_spaces import NO_SPACES, Spaces
from alfish.offline.sources import flat
from alfish.offline.sources.source_files import check_zip, existing_file, missing, said

NEEDED = ("observations", "actions", "rewards", "terminated")
KNOWN = (*NEEDED, "truncated", "next_observations", "lengths")
NESTS = ("observations", "actions", "next_observations")


CHUNK_BYTES = 2**23  # bytes that are read at a time
DAMAGE = (ValueError, TypeError, OSError, EOFError, RuntimeError, LookupError, zipfile.BadZipFile, zlib.error)


class NpzMember:
    """An array in an .npz file. A slice loads only the sliced rows, unless the array is in Fortran order.

    Slices are fastest in ascending order, because any other slice reads the array from its beginning. After the last
    row is read, the array's checksum is verified.

    Args:
      archive: open file.
      name: name of the array.

    Raises:
      UsageError: the array is damaged, or holds Python objects; slicing may raise this error, too.
    """

    def __init__(self, archive: zipfile.ZipFile, name: str):
        self._archive, self._name = archive, name
        with self._damage_named():
            self._open()
            held = archive.getinfo(f"{name}.npy").file_size
            if self.dtype.hasobject or self.nbytes > held:
                raise ValueError(
                    "" if self.dtype.hasobject else f"only {held:,} of its {self.nbytes:,} bytes are present"
                )

    def _open(self) -> None:
        self._file, self._row = self._archive.open(f"{self._name}.npy"), 0
        version = np.lib.format.read_magic(self._file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, self._is_transposed, dtype = read(self._file)
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        with self._damage_named():
            if self._is_transposed and len(self.shape) > 1:
                check_memory(self.nbytes, self._name)
                with self._archive.open(f"{self._name}.npy") as file:
                    return np.lib.format.read_array(file, allow_pickle=False)[rows]
            if start < self._row:
                self._open()
            self._read(start - self._row)
            return self._read(stop - start, keep=True)

    def _read(self, count: int, keep: bool = False) -> np.ndarray:
        """Reads the next rows, and returns them if `keep` is True."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        check_memory(count * row_bytes if keep else 0, self._name)
        array = np.empty((count if keep else 0, *self.shape[1:]), self.dtype)
        into = array.reshape(-1).view(np.uint8)
        at, size = 0, count * row_bytes
        while at < size:
            part = self._file.read(min(CHUNK_BYTES, size - at))
            if not part:
                raise EOFError("it is truncated")
            if keep:
                into[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        self._row += count
        if self._row == len(self):
            self._file.read(1)  # at the end of the array, zipfile compares the checksum
        return array

    @contextlib.contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except UsageError:
            raise
        except DAMAGE as error:
            why = f" ({said(error)})" if str(error) else ""
            raise UsageError(
                f"{self._archive.filename}: {self._name} cannot be read{why}; only undamaged arrays of numbers are "
                "supported, not Python objects"
            ) from error


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[Mapping[str, NpzMember]]:
    """Yields the arrays of a file by name; they can be read within the context.

    Raises:
      UsageError: the file is not an .npz file, or is damaged.
    """
    with open(path, "rb") as file:  # closed here, because an open archive keeps its file open for its members
        begin = file.read(6)
        if begin == b"\x93NUMPY":
            raise UsageError(
                f"{path} is a single array, but an .npz file with several arrays is needed; use numpy.savez"
            )
        if begin[:2] != b"PK":  # the beginning of every zip file
            raise UsageError(f"{path} is not an .npz file; write one with numpy.savez")
        check_zip(path, fits_memory=False)  # only parts of the file must fit in memory
        with zipfile.ZipFile(file) as archive:
            yield _Members(archive)


class _Members(Mapping[str, NpzMember]):
    """The arrays of an archive by name, each opened on first access."""

    def __init__(self, archive: zipfile.ZipFile):
        self._archive = archive
        self._names = [name.removesuffix(".npy") for name in archive.namelist()]

    def __getitem__(self, name: str) -> NpzMember:
        return NpzMember(self._archive, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class NpzSource(EpisodeSource):
    """Reads the episodes of `npz:file.npz`.

    Args:
      where: path of the file.
      environment: spaces of the environment, which are not used.

    Raises:
      UsageError: the file does not exist or is damaged, or names are missing or unknown.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        self._path = existing_file(where, "an .npz file")
        super().__init__(f"npz:{where}")
        with open_npz(self._path) as arrays:
            names = {name.partition("/")[0] for name in arrays}
        lacking, unknown = missing(names, NEEDED), sorted(names - {*KNOWN})
        if lacking or unknown:
            wrong = [f"no {name}" for name in lacking] + [f"{name}, which is not read" for name in unknown]
            hint = f"; write ogbench:{where} if it is an OGBench data set" if "terminals" in names else ""
            raise UsageError(f"{where} has {'; '.join(wrong)}: its arrays must be named {', '.join(KNOWN)}{hint}")

    def episodes(self) -> Iterator[Episode | Unreadable]:
        with open_npz(self._path) as arrays:
            parts: dict[str, Any] = {name: self._read(arrays, name) for name in KNOWN}
            for name in ("terminated", "truncated"):
                if parts[name] is not None:
                    parts[name] = flat.flags(parts[name], f"{self.name}: {name}")
            lengths = parts.pop("lengths")
            if lengths is None:
                yield from self._of_table(
                    flat.TransitionTable(**{name: parts[name] for name in flat.TransitionTable._fields})
                )
            else:
                yield from self._of_episodes(lengths, parts)

    def _of_table(self, table: flat.TransitionTable) -> Iterator[Episode | Unreadable]:
        flat.check_shapes(table, self.name)
        cuts, num_unmarked = flat.cut(table)
        for sentence in flat.notes(table, num_unmarked):
            self.note(sentence)
        for sentence in flat.warnings(table, "truncated", num_unmarked):
            self.warn(sentence)
        yield from flat.episodes(table, cuts)

    def _of_episodes(self, stored: NpzMember, parts: dict[str, Any]) -> Iterator[Episode]:
        if parts["next_observations"] is not None:
            raise UsageError(
                f"{self.name} has both lengths and next_observations; with lengths, observations already contain the "
                "next observations"
            )
        lengths = self._lengths(stored)
        count = sum(map(int, lengths))  # numpy's sum could overflow
        needed = {"observations": count + len(lengths), "actions": count, "rewards": count}
        for name, expected in needed.items():
            for label, leaf in nest.named_leaves(parts[name], name):
                flat.check_rows(leaf, f"{self.name}: {label}")
                if len(leaf) != expected:
                    raise UsageError(
                        f"{self.name}: {label} has {len(leaf):,} rows, but the array of lengths requires {expected:,}"
                    )
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

    def _lengths(self, stored: NpzMember) -> np.ndarray:
        if len(stored.shape) != 1:
            raise UsageError(
                f"{self.name}: lengths has shape {list(stored.shape)}, but [E], one number for each episode, is "
                "expected"
            )
        if stored.dtype.kind not in "iu":
            raise UsageError(f"{self.name}: lengths has dtype {stored.dtype}, but integers are expected")
        lengths = stored[:]
        if (lengths < 0).any():
            raise UsageError(f"{self.name}: lengths has {lengths.min()}, but a number of transitions must be 0 or more")
        return lengths

    def _flags(self, values: Any, name: str, number: int, rows: slice, num_episodes: int, count: int) -> np.ndarray:
        """Returns an episode's flags `[T]`; the file has one flag for each episode, or one for each transition."""
        length = rows.stop - rows.start
        if values is None:
            return np.zeros(length, bool)
        if len(values) == num_episodes != count:
            return ends(length, values[number], False)[0]
        if len(values) != count:
            raise UsageError(
                f"{self.name}: {name} has {len(values):,} rows, but needs one row for each of {num_episodes:,} "
                f"episodes or of {count:,} steps"
            )
        return values[rows]

    def _read(self, arrays: Mapping[str, NpzMember], name: str) -> Nest:
        found = [key for key in arrays if key == name or key.startswith(f"{name}/")]
        if found and found != [name] and name not in NESTS:
            raise UsageError(
                f"{self._path} has {', '.join(found)}, but {name} must be a single array; write it under that name"
            )
        for one, other in itertools.permutations(found, 2):
            if other.startswith(f"{one}/"):
                raise UsageError(f"{self._path} has {one} and {other}; write one of them under another name")
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
