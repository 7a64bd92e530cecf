"""alfish's own format of episodes: a directory of checkpoint files with about 32 MB of episodes each.

    data_set.json                             spaces, counts, where the data came from, the validator's report
    episodes/checkpoint-000000000000.pt, ...  whole episodes, in the stream's dtypes and the environment's units

The files are numbered from 0. Each file has a checksum, and loading a file executes nothing (`checkpoint_file`). The
directory is renamed to its final name when it is complete. `EpisodeWriter` is the base of all writers of data sets: it
collects episodes, writes some megabytes at a time, and cleans up after errors.
"""

import abc
import contextlib
import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.errors import RunError, UsageError, printable
from alfish.offline.episode import Episode, ends
from alfish.offline.limits import check_nest, check_tensor
from alfish.offline.recorded_spaces import Spaces, to_json
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.files import temporary_of, write_atomically

SHARD_BYTES = 32 * 2**20  # bytes of observations and actions that are written together


class EpisodeWriter(abc.ABC):
    """Writes a data set. At the end of its context, removes all files unless `finish` has completed the data set.

    Args:
      name: name of the data set, for messages.
      making: temporary directory in which the data set is written; `_put_in_place` moves the data set from there to
        its final path.

    Raises:
      RunError: a file cannot be written; raised by each method.
    """

    def __init__(self, name: str, making: Path):
        self._name, self._making = name, making
        self._waiting: list[Episode] = []
        self._num_bytes = 0  # bytes of the waiting episodes

    def __enter__(self) -> "EpisodeWriter":
        with self._named_errors():
            self._making.mkdir(parents=True)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        shutil.rmtree(self._making, ignore_errors=True)

    def add(self, episode: Episode) -> None:
        """Adds an episode that the validator returned."""
        self._waiting.append(episode)
        self._num_bytes += sum(leaf.nbytes for leaf in nest.leaves((episode.observations, episode.actions)))
        if self._num_bytes >= SHARD_BYTES:
            self._write_waiting()

    def finish(self, about: dict[str, Any]) -> None:
        """Writes the remaining episodes and moves the data set to its final path.

        Args:
          about: description of the data's origin in JSON's types, stored with the data.
        """
        if self._waiting:
            self._write_waiting()
        with self._named_errors():
            self._put_in_place(about)

    @abc.abstractmethod
    def _write(self, episodes: list[Episode]) -> None:
        """Appends one or more episodes to the files in the temporary directory."""

    @abc.abstractmethod
    def _put_in_place(self, about: dict[str, Any]) -> None:
        """Writes the description of the data set, and moves the data set to its final directory."""

    def _write_waiting(self) -> None:
        with self._named_errors():
            self._write(self._waiting)
        self._waiting, self._num_bytes = [], 0

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # RuntimeError is raised by torch or HDF5
            raise RunError(f"{self._name} cannot be written ({error}); the unfinished files were removed") from error


INDEX_FILE, EPISODES_DIRECTORY = "data_set.json", "episodes"
FORMAT_VERSION = 1


class DataSetWriter(EpisodeWriter):
    """Writes a data set in alfish's own format; the index file stores the description that `finish` receives.

    Args:
      directory: path of the data set's directory, which must not exist yet or be empty.
      spaces: spaces of the episodes.

    Raises:
      UsageError: the path is a file, or a directory with content, or has no name, such as '.'.
      RunError: a file cannot be written; raised by each method.
    """

    def __init__(self, directory: str | Path, spaces: Spaces):
        self._directory = Path(directory).expanduser()
        if self._directory.is_file():
            raise UsageError(f"{directory} is a file; choose another place for the data set")
        if self._directory.is_dir() and any(self._directory.iterdir()):
            raise UsageError(
                f"{directory} is not empty; choose another place for the data set, or move the existing one away"
            )
        if not self._directory.name:  # a temporary directory next to the path is renamed to the path
            raise UsageError(f"{directory} cannot be replaced by a data set; choose a new directory, such as data/mine")
        super().__init__(str(self._directory), temporary_of(self._directory))
        self._spaces = spaces
        self._checkpoints = Checkpoints(self._making / EPISODES_DIRECTORY, keep_last=2**62)
        self._shards: list[int] = []  # number of episodes in each file

    def _write(self, episodes: list[Episode]) -> None:
        self._checkpoints.save(len(self._shards), packed_episodes(episodes))
        self._shards.append(len(episodes))

    def _put_in_place(self, about: dict[str, Any]) -> None:
        index = {
            "format": FORMAT_VERSION,
            "observation_space": to_json(self._spaces.observation),
            "action_space": to_json(self._spaces.action),
            "num_episodes_of_file": self._shards,
            **about,
        }
        write_atomically(self._making / INDEX_FILE, json.dumps(index, indent=1) + "\n")
        os.replace(self._making, self._directory)


def packed_episodes(episodes: list[Episode]) -> dict[str, Any]:
    """Returns episodes as a nest of concatenated tensors for a checkpoint."""

    def joined(*leaves: np.ndarray) -> torch.Tensor:
        # Contiguous, because readers do not accept the memory order of transposed arrays.
        return torch.from_numpy(np.ascontiguousarray(np.concatenate(leaves)))

    return {
        "ids": [printable(str(episode.id)) for episode in episodes],
        "length": torch.tensor([episode.length for episode in episodes]),
        "terminated": torch.tensor([bool(episode.terminated[-1]) for episode in episodes]),
        "rewards": joined(*(episode.rewards for episode in episodes)),
        "observations": nest.map(joined, *(episode.observations for episode in episodes)),
        "actions": nest.map(joined, *(episode.actions for episode in episodes)),
    }


def unpacked_episodes(state: dict[str, Any]) -> Iterator[Episode]:
    """Yields the episodes that `packed_episodes` packed.

    Raises:
      LookupError, TypeError, ValueError, UsageError: the state is not a result of `packed_episodes`.
    """

    def array(name: str, tensor: Any) -> np.ndarray:
        return check_tensor(tensor, name).numpy()

    for name in ("observations", "actions", "rewards"):
        check_nest(state[name], name)
    observations, actions, rewards = (
        nest.map(functools.partial(array, name), state[name]) for name in ("observations", "actions", "rewards")
    )
    ids, lengths, terminated = state["ids"], state["length"].tolist(), state["terminated"].tolist()
    count = sum(lengths)
    if not all(isinstance(flag, bool) for flag in terminated):
        raise ValueError("`terminated` is not one bool for each episode")
    if not all(isinstance(id, str) and id.isprintable() for id in ids) or min(lengths, default=0) < 0:
        raise ValueError("its ids or lengths do not describe episodes")
    for name, values, expected in (
        ("rewards", rewards, count),
        ("actions", actions, count),
        ("observations", observations, count + len(lengths)),
    ):
        for leaf in nest.leaves(values):
            if leaf.shape[:1] != (expected,):
                raise ValueError(f"its {name} have shape {list(leaf.shape)}, but {expected} rows are expected")
    start = 0
    for number, (id, length, ended) in enumerate(zip(ids, lengths, terminated, strict=True)):
        taken, seen = slice(start, start + length), slice(start + number, start + number + length + 1)
        yield Episode(
            id,
            nest.at(observations, seen),
            nest.at(actions, taken),
            rewards[taken],
            *ends(length, ended, not ended),
        )
        start += length
