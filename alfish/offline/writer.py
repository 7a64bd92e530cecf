"""What every writer of a data set does: gather whole episodes, write them some megabytes at a time, tidy up."""

import abc
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alfish import nest
from alfish.errors import RunError
from alfish.offline.episode import Episode

SHARD_BYTES = 32 * 2**20  # of observations and actions, after which they are written


class EpisodeWriter(abc.ABC):
    """Writes a data set; a context that leaves nothing behind where it ends with an error.

    Args:
      name: of the data set, for messages.
      making: the directory that it is made in, from which `_put_in_place` moves it.

    Raises:
      RunError: of each method, the disk fails.
    """

    def __init__(self, name: str, making: Path):
        self._name, self._making = name, making
        self._waiting: list[Episode] = []
        self._num_bytes = 0  # of those that wait

    def __enter__(self) -> "EpisodeWriter":
        with self._named_errors():
            self._making.mkdir(parents=True)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        shutil.rmtree(self._making, ignore_errors=True)

    def add(self, episode: Episode) -> None:
        """Takes an episode that the validator has passed."""
        self._waiting.append(episode)
        self._num_bytes += sum(leaf.nbytes for leaf in nest.leaves((episode.observations, episode.actions)))
        if self._num_bytes >= SHARD_BYTES:
            self._write_waiting()

    def finish(self, about: dict[str, Any]) -> None:
        """Puts the data set in its place.

        Args:
          about: how it came about, of JSON's types, kept with it.
        """
        if self._waiting:
            self._write_waiting()
        with self._named_errors():
            self._put_in_place(about)

    @abc.abstractmethod
    def _write(self, episodes: list[Episode]) -> None:
        """Writes episodes, at least one, behind those before."""

    @abc.abstractmethod
    def _put_in_place(self, about: dict[str, Any]) -> None:
        """Writes what is said of the data set, and moves it to where it is read."""

    def _write_waiting(self) -> None:
        with self._named_errors():
            self._write(self._waiting)
        self._waiting, self._num_bytes = [], 0

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # the latter is torch's, or HDF5's
            raise RunError(f"{self._name} cannot be written ({error}); nothing is left of it") from error
