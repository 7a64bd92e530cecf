"""alfish's own layout of episodes: a directory that holds checkpoints of some thousand transitions each.

    data_set.json                             spaces, counts, where the data came from, the validator's report
    episodes/checkpoint-000000000000.pt, ...  whole episodes, in the stream's dtypes and the environment's units

The files are numbered from 0. Each has a checksum, and loading it executes nothing (`checkpoint_file`). The
directory gets its name when it is complete.
"""

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.errors import UsageError, printable
from alfish.offline.episode import Episode, ends
from alfish.offline.sources.files import check_tensor
from alfish.offline.sources.limits import check_nest
from alfish.offline.spaces import Spaces, to_json
from alfish.offline.writer import EpisodeWriter
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.files import temporary_of, write_atomically

INDEX_FILE, EPISODES_DIRECTORY = "data_set.json", "episodes"
FORMAT_VERSION = 1


class DataSetWriter(EpisodeWriter):
    """Writes a data set in alfish's own layout; its index stores the description that `finish` receives.

    Args:
      directory: new, or empty.
      spaces: of the episodes.

    Raises:
      UsageError: the directory is not empty, or has no name.
      RunError: a file cannot be written; raised by each method.
    """

    def __init__(self, directory: str | Path, spaces: Spaces):
        self._directory = Path(directory).expanduser()
        if self._directory.is_file():
            raise UsageError(f"{directory} is a file; choose another place for the data set")
        if self._directory.is_dir() and any(self._directory.iterdir()):
            raise UsageError(f"{directory} is not empty; choose another place for the data set, or move that one away")
        if not self._directory.name:  # because it is made beside its place and then renamed
            raise UsageError(f"{directory} cannot be replaced by a data set; name a new directory, as data/mine")
        super().__init__(str(self._directory), temporary_of(self._directory))
        self._spaces = spaces
        self._checkpoints = Checkpoints(self._making / EPISODES_DIRECTORY, keep_last=2**62)
        self._shards: list[int] = []  # episodes in each file

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
        # Rows of transposed arrays would keep their order in memory, which no reader takes.
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
      LookupError, TypeError, ValueError: the state is no result of `packed_episodes`.
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
        raise ValueError("terminated is no truth value an episode")
    if not all(isinstance(id, str) and id.isprintable() for id in ids) or min(lengths, default=0) < 0:
        raise ValueError("its ids or lengths are not those of episodes")
    for name, values, expected in (
        ("rewards", rewards, count),
        ("actions", actions, count),
        ("observations", observations, count + len(lengths)),
    ):
        for leaf in nest.leaves(values):
            if leaf.shape[:1] != (expected,):
                raise ValueError(f"its {name} have shape {list(leaf.shape)}, and {expected} rows are expected")
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
