"""Minari's data sets, read through its API.

Needs the extra 'minari', and 'arrow' for data sets in Arrow or Parquet. Its episodes have the same form: T+1
observations, and T actions, rewards and flags.
"""

import contextlib
import difflib
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable
from alfish.offline.sources.files import check_regular, extra, open_hdf5, read_json, said
from alfish.offline.sources.limits import check_expansion, check_memory, stored_values
from alfish.offline.spaces import NO_SPACES, Spaces

METADATA, EPISODE = "metadata.json", re.compile(r"episode_(\d+)")
# What h5py, pyarrow and Minari's own checks raise at an episode that is damaged or lacks a part.
DAMAGE = (OSError, KeyError, ValueError, AssertionError, IndexError, TypeError, RecursionError)


class MinariSource(EpisodeSource):
    """Reads the episodes of `minari:namespace/name-v0`, a data set on this machine.

    Args:
      where: the data set's id.
      environment: not used.

    Raises:
      UsageError: the data set is not on this machine (names close matches), or is damaged.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        minari = extra("minari", "minari", "a Minari data set")
        from minari.storage.datasets_root_dir import get_dataset_path

        path = get_dataset_path(where)
        if not (path / "data").is_dir():
            raise UsageError(_absent(minari, where, path))
        try:
            metadata: Any = read_json(path / "data" / METADATA)
            held = _held(path / "data", metadata["data_format"])
            total = operator.index(metadata["total_episodes"])
            if not 0 <= total <= 2 * len(held) + 100:  # some may be lost
                raise ValueError(f"it declares {total:,} episodes and holds {len(held):,}")
            for kind in ("observation_space", "action_space"):
                if kind not in metadata:
                    # Minari would build the environment that the file describes, which imports whatever that says.
                    raise UsageError(f"minari:{where} declares no {kind}; write it again with a newer Minari")
            self._dataset = minari.load_dataset(where)
        except UsageError:
            raise
        except ImportError as error:
            raise UsageError(
                f"minari:{where} needs the extra 'arrow': pip install 'alfish[arrow]' ({error})"
            ) from error
        except DAMAGE as error:
            raise UsageError(f"{path} is not a whole Minari data set: {said(error)}; download it again") from error
        spaces = Spaces(self._dataset.observation_space, self._dataset.action_space)
        super().__init__(f"minari:{where}", spaces)
        self._missing = [i for i in range(total) if i not in held]
        beyond = [i for i in held if i >= total]
        if beyond:
            self.warn(
                f"{len(beyond):,} episodes are not read, since they stand beyond total_episodes = {total:,} of "
                f"{METADATA}: {', '.join(map(str, sorted(beyond)[:5]))}"
            )

    def episodes(self) -> Iterator[Episode | Unreadable]:
        for i in self._missing:
            yield Unreadable(str(i), "it is not there")
        missing = set(self._missing)
        indices = [i for i in map(int, self._dataset.episode_indices) if i not in missing]
        done = 0
        try:
            # One generator for all, because it opens the file once.
            for episode in self._dataset.iterate_episodes(indices):
                yield _episode(episode)
                done += 1
        except DAMAGE:
            for i in indices[done:]:
                yield self._read_alone(i)

    def _read_alone(self, i: int) -> Episode | Unreadable:
        try:
            (episode,) = self._dataset.iterate_episodes([i])
            return _episode(episode)
        except DAMAGE as error:
            return Unreadable(str(i), said(error))


def _held(data: Path, data_format: str) -> set[int]:
    """Returns the numbers of the episodes in the files.

    Raises:
      UsageError: the files refer to other files, or declare more than they store.
    """
    if data_format == "hdf5":  # one file, which opens as a whole or not at all
        with open_hdf5(data / "main_data.hdf5", "a Minari data set") as file:
            return {int(name[1]) for name in map(EPISODE.fullmatch, file) if name}
    for path in data.glob("*/*"):
        check_regular(path)
        if path.suffix == f".{data_format}":
            declared = 0
            with contextlib.suppress(OSError, ValueError, LookupError):  # a damaged one is named when it is read
                declared = _declared(path, data_format)
            check_expansion(declared, path.stat().st_size, str(path))
            check_memory(declared, str(path))
    return {int(entry.name) for entry in data.iterdir() if entry.name.isdecimal()}


def _declared(path: Path, data_format: str) -> int:
    """Returns the bytes of a file's rows in memory; compressed, they may take a thousandth of that."""
    if data_format == "parquet":
        with extra("pyarrow.parquet", "arrow", "a Minari data set").ParquetFile(path) as file:
            stored = sum(values for _, values in stored_values(file.metadata))  # also of lists of any length
            return max(stored, file.metadata.num_rows * sum(map(_row_bytes, file.schema_arrow.types)))
    ipc = extra("pyarrow.ipc", "arrow", "a Minari data set")
    with ipc.open_file(str(path)) as file:
        schema = file.schema
    one = ipc.IpcReadOptions(included_fields=[schema.names.index("terminations")])  # the narrowest, a bit a row
    with ipc.open_file(str(path), options=one) as file:
        num_rows = sum(file.get_batch(i).num_rows for i in range(file.num_record_batches))
    return num_rows * sum(map(_row_bytes, schema.types))


def _row_bytes(kind: Any) -> int:
    """Returns the bytes of a row of an Arrow type; of a type of variable length, those of its offset."""
    if getattr(kind, "num_fields", 0):
        size = sum(_row_bytes(kind.field(i).type) for i in range(kind.num_fields))
        return size * getattr(kind, "list_size", 1)
    with contextlib.suppress(ValueError):
        return max(1, kind.bit_width // 8)
    return 8


def _episode(episode: Any) -> Episode:
    rewards, terminated, truncated = (
        np.asarray(part) for part in (episode.rewards, episode.terminations, episode.truncations)
    )
    return Episode(
        str(episode.id), _arrays(episode.observations), _arrays(episode.actions), rewards, terminated, truncated
    )


def _arrays(part: Any) -> Nest:
    if isinstance(part, dict):
        return {key: _arrays(child) for key, child in part.items()}
    if isinstance(part, tuple):
        return tuple(_arrays(child) for child in part)
    return np.asarray(part)


def _absent(minari: Any, where: str, path: Any) -> str:
    local = sorted(minari.list_local_datasets())
    close = difflib.get_close_matches(where, local, 3, 0.5) or local[:3]
    hint = f"here are {', '.join(close)}; " if close else ""
    return f"minari:{where} is not on this machine ({path}); {hint}`minari download {where}` fetches what is published"
