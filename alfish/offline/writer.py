"""The base of data set writers: collects episodes, writes some megabytes at a time, and cleans up after errors."""

import abc
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alfish import nest
from alfish.errors import RunError
from alfish.offline.episode import Episode

SHARD_BYTES = 32 * 2**20  # of observations and actions that are written together


class EpisodeWriter(abc.ABC):
    """Writes a data set; a context that removes all files if it ends with an error.

    Args:
      name: of the data set, for messages.
      making: directory in which the data set is made; `_put_in_place` moves it.

    Raises:
      RunError: a file cannot be written; raised by each method.
    """

    def __init__(self, name: str, making: Path):
        self._name, self._making = name, making
        self._waiting: list[Episode] = []
        self._num_bytes = 0  # of the waiting episodes

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
        """Writes the remaining episodes and moves the data set to its place.

        Args:
          about: description of its origin in JSON's types, stored with it.
        """
        if self._waiting:
            self._write_waiting()
        with self._named_errors():
            self._put_in_place(about)

    @abc.abstractmethod
    def _write(self, episodes: list[Episode]) -> None:
        """Appends episodes, at least one."""

    @abc.abstractmethod
    def _put_in_place(self, about: dict[str, Any]) -> None:
        """Writes the description of the data set, and moves it to its final directory."""

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
