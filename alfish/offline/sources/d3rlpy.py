"""d3rlpy's HDF5 files: the output of `dump` of a buffer or data set, and the tables of version 1.

Needs the extra 'hdf5'. The format has no final observations. If an episode terminated, its last observation is
repeated; otherwise its last step is dropped. The format declares no spaces.
"""

import itertools
import operator
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from alfish import nest
from alfish.errors import UsageError, printable
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable, ends, without_final_observation
from alfish.offline.limits import NotEnoughMemory, check_memory
from alfish.offline.recorded_spaces import NO_SPACES, Spaces
from alfish.offline.sources import flat
from alfish.offline.sources.recognition import foreign_hdf5
from alfish.offline.sources.source_files import (
    HDF5_DAMAGE,
    MAX_WORDS,
    damage_named,
    existing_file,
    missing,
    open_hdf5,
    said,
)

COLUMNS = ("observations", "actions", "rewards", "terminated")
EPISODE = re.compile(r"actions_(\d+)(_0)?")
OLD_COLUMNS = ("observations", "actions", "rewards", "terminals")


class D3rlpySource(EpisodeSource):
    """Reads the episodes of `d3rlpy:file.h5`.

    Args:
      where: path of the file.
      environment: spaces of the environment, which are not used.

    Raises:
      UsageError: the file does not exist, or is not in this format.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        self._path = existing_file(where, "a d3rlpy data set")
        super().__init__(f"d3rlpy:{where}")
        with open_hdf5(self._path, "a d3rlpy data set") as file, damage_named(self._path):
            self._is_old = "num_episodes" not in file
            lacking = missing(file, OLD_COLUMNS) if self._is_old else missing(_columns(file), COLUMNS)
            if lacking:
                has = f"; {foreign}" if (foreign := foreign_hdf5(file)) else ""
                raise UsageError(f"{where} has no {' and no '.join(lacking)}, so it is not a d3rlpy data set{has}")
            of_d4rl = [name for name in ("timeouts", "next_observations") if name in file]
            if self._is_old and of_d4rl:
                raise UsageError(f"{where} has {' and '.join(of_d4rl)}, so it is a D4RL data set; write d4rl:{where}")
        self.note(
            "d3rlpy stores no final observations: the last step of an episode that did not terminate is dropped, and "
            "the last observation of a terminated episode is used as its final observation"
        )

    def episodes(self) -> Iterator[Episode | Unreadable]:
        with open_hdf5(self._path, "a d3rlpy data set", is_checked=True) as file:
            if self._is_old:
                yield from self._old(file)
                return
            with damage_named(self._path):
                num_episodes = operator.index(file["num_episodes"][()])
            if not 0 <= num_episodes <= len(file):  # each episode has several entries
                raise UsageError(
                    f"{self._path} is damaged: it declares {num_episodes:,} episodes but has {len(file):,} entries in "
                    "total; download it again"
                )
            numbers = {int(name[1]) for name in map(EPISODE.fullmatch, map(str, file)) if name}
            beyond = sorted(number for number in numbers if number >= num_episodes)
            if beyond:
                self.warn(
                    f"{len(beyond):,} episodes are not read, because their indices are not below num_episodes = "
                    f"{num_episodes:,}: {', '.join(map(str, beyond[:5]))}"
                )
            for i in range(num_episodes):
                try:
                    parts = [_column(file, name, i) for name in COLUMNS]
                except NotEnoughMemory:
                    raise
                except HDF5_DAMAGE as error:
                    yield Unreadable(str(i), said(error).strip("'\""))
                    continue
                yield self._episode(str(i), *parts)

    def _episode(
        self, id: str, observations: Nest, actions: Nest, rewards: Any, terminated: Any
    ) -> Episode | Unreadable:
        if np.shape(rewards)[1:] != (1,):
            return Unreadable(id, f"its rewards have shape {list(np.shape(rewards))}, but [T, 1] is expected")
        if np.ndim(terminated) or terminated not in (0, 1):
            return Unreadable(id, f"terminated is {printable(str(terminated))[:MAX_WORDS]}, but a flag must be 0 or 1")
        flags = ends(len(rewards), terminated, not terminated)
        return without_final_observation(id, observations, nest.map(_action, actions), rewards[:, 0], *flags)

    def _old(self, file: Any) -> Iterator[Episode | Unreadable]:
        with damage_named(self._path):
            terminated = flat.flags(file["terminals"], f"{self.name}: terminals")
            ending = None
            if "episode_terminals" in file:
                ending = flat.flags(file["episode_terminals"], f"{self.name}: episode_terminals")
            flat.check_rows(file["actions"], f"{self.name}: actions")
            actions = _action(_read(file["actions"]))
            table = flat.TransitionTable(file["observations"], actions, file["rewards"], terminated, ending)
            flat.check_shapes(table, self.name)
            if ending is not None:
                table = table._replace(truncated=ending & ~terminated)
            cuts, _ = flat.cut(table)
        for sentence in flat.warnings(table, "episode_terminals"):
            self.warn(sentence)
        yield from flat.episodes(table, cuts)


def _columns(file: Any) -> list[str]:
    return [name.decode() if isinstance(name, bytes) else str(name) for name in file["columns"][()]]


def _column(file: Any, name: str, i: int) -> Nest:
    """Returns the column of episode `i`: an array, or a tuple of arrays."""
    if f"{name}_{i}" in file or f"{name}_{i}_0" not in file:
        return _read(file[f"{name}_{i}"])
    count = next(j for j in itertools.count(1) if f"{name}_{i}_{j}" not in file)
    return tuple(_read(file[f"{name}_{i}_{j}"]) for j in range(count))


def _read(stored: Any) -> np.ndarray:
    """Reads an HDF5 data set of numbers into memory."""
    if getattr(stored, "dtype", np.dtype(object)).kind not in flat.NUMBERS:
        raise TypeError(f"{stored.name} has no numbers")
    check_memory(stored.nbytes, stored.name)
    return stored[()]


def _action(values: np.ndarray) -> np.ndarray:
    """Returns actions `[T, ...]`; discrete actions, which the format stores as `[T, 1]` integers, become `[T]`."""
    is_discrete = values.dtype.kind in "iu" and values.ndim == 2 and values.shape[1] == 1
    return values[:, 0] if is_discrete else values
