"""Minari's data sets, read through its API.

Needs the extra 'minari', and 'arrow' for data sets in Arrow or Parquet. Minari's episodes have the same form as
alfish's: T+1 observations, and T actions, rewards and flags. Text in dict observations is left out.
"""

import contextlib
import difflib
import operator
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from alfish.errors import UsageError, optional_module, printable
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable
from alfish.offline.limits import check_expansion, check_memory, stored_values
from alfish.offline.recorded_spaces import NO_SPACES, Spaces
from alfish.offline.sources.source_files import check_regular, open_hdf5, read_json, said
from alfish.specs import LEAF_SPACES

METADATA, EPISODE = "metadata.json", re.compile(r"episode_(\d+)")
# Errors that h5py, pyarrow and Minari's own checks raise for an episode that is damaged or lacks a part.
DAMAGE = (OSError, KeyError, ValueError, AssertionError, IndexError, TypeError, RecursionError)


class MinariSource(EpisodeSource):
    """Reads the episodes of `minari:namespace/name-v0`, a data set on this machine.

    Args:
      where: id of the data set.
      environment: spaces of the environment, which are not used.
      leave_out: comma-separated keys of dict observations that are not read; 'outer.inner' is a key of a nested dict.

    Raises:
      UsageError: the data set is not on this machine (the message names close matches), is damaged, or cannot be read
        by the installed version of Minari; or a key does not exist.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES, leave_out: str = ""):
        minari = optional_module("minari", "minari", "a Minari data set")
        from minari.storage.datasets_root_dir import get_dataset_path

        path = get_dataset_path(where)
        if not (path / "data").is_dir():
            raise UsageError(_absent(minari, where, path))
        try:
            metadata: Any = read_json(path / "data" / METADATA)
            _check_metadata(minari, where, metadata)
            held = _held(path / "data", metadata["data_format"])
            total = operator.index(metadata["total_episodes"])
            if not 0 <= total <= 2 * len(held) + 100:  # some episodes may be lost
                raise ValueError(f"it declares {total:,} episodes but has {len(held):,}")
            self._dataset = minari.load_dataset(where)
        except UsageError:
            raise
        except ImportError as error:
            raise UsageError(
                f"minari:{where} needs the extra 'arrow': pip install 'alfish[arrow]' ({error})"
            ) from error
        except DAMAGE as error:
            raise UsageError(f"{path} is not a complete Minari data set: {said(error)}; download it again") from error
        declared = self._dataset.observation_space
        self._left_out = _left_out(declared, {*leave_out.split(",")} - {""})
        kept = _without(declared, self._left_out)
        super().__init__(f"minari:{where}", Spaces(kept, self._dataset.action_space))
        self._tell_of_lost_content(where, leave_out)
        self._missing = [i for i in range(total) if i not in held]
        if beyond := sorted(i for i in held if i >= total):
            self.warn(
                f"{len(beyond):,} episodes are not read, because their indices are not below total_episodes = "
                f"{total:,} of {METADATA}: {', '.join(map(str, beyond[:5]))}"
            )

    def _tell_of_lost_content(self, where: str, leave_out: str) -> None:
        for name in self._left_out:
            key = name.partition(".")[2]
            if key in leave_out.split(","):
                self.note(f"{name} is left out")
            else:
                self.warn(
                    f"{name} is text or another unsupported kind, so it is left out; to leave it out without this "
                    f"warning, use minari:{where}?leave_out={key}"
                )
        if getattr(self._dataset.storage, "jpeg_encoding", True) and any(map(_is_image, self.spaces)):
            self.note(
                "images are stored as JPEG, Minari's default, so pixels differ from the recorded ones; record with "
                "jpeg_encoding=False to keep them"
            )

    def episodes(self) -> Iterator[Episode | Unreadable]:
        for i in self._missing:
            yield Unreadable(str(i), "it is not there")
        missing = set(self._missing)
        indices = [i for i in map(int, self._dataset.episode_indices) if i not in missing]
        done = 0
        try:
            # A single generator, so that the file is opened only once.
            for episode in self._dataset.iterate_episodes(indices):
                yield self._episode(episode)
                done += 1
        except DAMAGE:
            for i in indices[done:]:
                yield self._read_alone(i)

    def _episode(self, episode: Any) -> Episode:
        rewards, terminated, truncated = (
            np.asarray(part) for part in (episode.rewards, episode.terminations, episode.truncations)
        )
        observations = _arrays(episode.observations, self._left_out)
        return Episode(str(episode.id), observations, _arrays(episode.actions), rewards, terminated, truncated)

    def _read_alone(self, i: int) -> Episode | Unreadable:
        try:
            (episode,) = self._dataset.iterate_episodes([i])
            return self._episode(episode)
        except DAMAGE as error:
            return Unreadable(str(i), said(error))


def _held(data: Path, data_format: str) -> set[int]:
    """Returns the indices of the episodes in the files.

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
            # Errors are ignored here, because reading the episode raises an error that names the file.
            with contextlib.suppress(OSError, ValueError, LookupError):
                declared = _declared(path, data_format)
            check_expansion(declared, path.stat().st_size, str(path))
            check_memory(declared, str(path))
    return {int(entry.name) for entry in data.iterdir() if entry.name.isdecimal()}


def _declared(path: Path, data_format: str) -> int:
    """Returns the bytes of a file's rows in memory; compressed rows may be a thousand times smaller."""
    if data_format == "parquet":
        with optional_module("pyarrow.parquet", "arrow", "a Minari data set").ParquetFile(path) as file:
            stored = sum(values for _, values in stored_values(file.metadata))  # includes the entries of lists
            return max(stored, file.metadata.num_rows * sum(map(_row_bytes, file.schema_arrow.types)))
    ipc = optional_module("pyarrow.ipc", "arrow", "a Minari data set")
    with ipc.open_file(str(path)) as file:
        schema = file.schema
    # Only the narrowest column is read, which takes one bit per row.
    one = ipc.IpcReadOptions(included_fields=[schema.names.index("terminations")])
    with ipc.open_file(str(path), options=one) as file:
        num_rows = sum(file.get_batch(i).num_rows for i in range(file.num_record_batches))
    return num_rows * sum(map(_row_bytes, schema.types))


def _row_bytes(kind: Any) -> int:
    """Returns the bytes of a row of an Arrow type; for a type of variable length, the bytes of the offset."""
    if getattr(kind, "num_fields", 0):
        size = sum(_row_bytes(kind.field(i).type) for i in range(kind.num_fields))
        return size * getattr(kind, "list_size", 1)
    with contextlib.suppress(ValueError):
        return max(1, kind.bit_width // 8)
    return 8


def _arrays(part: Any, left_out: Collection[str] = (), path: str = "observation") -> Nest:
    if isinstance(part, dict):
        named = {key: f"{path}.{key}" for key in part}
        return {key: _arrays(part[key], left_out, name) for key, name in named.items() if name not in left_out}
    if isinstance(part, tuple):
        return tuple(_arrays(child) for child in part)
    return np.asarray(part)


def _left_out(space: spaces.Space, asked: set[str]) -> list[str]:
    """Returns the names of parts of observations that the user leaves out, or that are not supported.

    Raises:
      UsageError: a part that the user names does not exist.
    """
    found = dict(_parts(space, "observation"))
    if unknown := asked - {name.partition(".")[2] for name in found}:
        there = ", ".join(sorted(name.partition(".")[2] for name in found)) or "none"
        raise UsageError(f"leave_out has {', '.join(sorted(unknown))}, but the keys of observations are {there}")
    names: list[str] = []
    for name, part in found.items():  # a dict comes before its parts
        is_asked = name.partition(".")[2] in asked
        if (is_asked or not isinstance(part, (spaces.Dict, spaces.Tuple, *LEAF_SPACES))) and not any(
            name.startswith(f"{outer}.") for outer in names
        ):
            names.append(name)
    return names


def _parts(space: spaces.Space, path: str) -> Iterator[tuple[str, spaces.Space]]:
    """Yields the entries of nested Dict spaces, each with its name, such as `observation.camera`."""
    for key, child in space.items() if isinstance(space, spaces.Dict) else ():
        yield f"{path}.{key}", child
        yield from _parts(child, f"{path}.{key}")


def _without(space: spaces.Space, left_out: Collection[str], path: str = "observation") -> spaces.Space:
    """Returns a space without the entries that `left_out` names."""
    if not isinstance(space, spaces.Dict):
        return space
    named = {key: f"{path}.{key}" for key in space}
    return spaces.Dict(
        {key: _without(space[key], left_out, name) for key, name in named.items() if name not in left_out}
    )


def _is_image(space: spaces.Space | None) -> bool:
    """Returns whether Minari stores a part of a space as JPEG."""
    from minari.dataset.minari_storage import is_image_space

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return any(map(_is_image, space.values() if isinstance(space, spaces.Dict) else space))
    return space is not None and is_image_space(space)


def _check_metadata(minari: Any, where: str, metadata: Any) -> None:
    """Raises UsageError or ValueError if the installed Minari cannot read a data set, or would run code from it."""
    if not isinstance(metadata, dict):
        raise ValueError(f"{METADATA} has no names")
    version = metadata.get("minari_version")
    if version is not None and version not in minari.supported_dataset_versions:
        raise UsageError(
            f"minari:{where} was written by Minari {printable(str(version))[:20]}, but Minari {minari.__version__}, "
            "which is installed here, cannot read it; pip install --upgrade minari"
        )
    for kind in ("observation_space", "action_space"):
        if kind not in metadata:
            # Without the space, Minari would build the file's environment, and import any module that the file names.
            raise UsageError(f"minari:{where} declares no {kind}; write it again with a newer Minari")


def _absent(minari: Any, where: str, path: Any) -> str:
    local = sorted(minari.list_local_datasets())
    close = difflib.get_close_matches(where, local, 3, 0.5) or local[:3]
    hint = f"here are {', '.join(close)}; " if close else ""
    return (
        f"minari:{where} is not on this machine ({path}); {hint}`minari download {where}` downloads published data sets"
    )
