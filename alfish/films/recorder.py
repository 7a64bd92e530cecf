"""Recorders: one film of several episodes at once, or a film for each episode."""

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alfish import nest
from alfish.films.camera import Camera
from alfish.films.caption import captioned
from alfish.formatting import significant
from alfish.nest import Nest
from alfish.runs.files import make_directory
from alfish.runs.film_file import FilmFile

FILMS = "films"  # directory of a run


class Row(NamedTuple):
    """The rows of an evaluation after a reset or a step of its environments.

    Attributes:
      episode: `[B]` int, the episode of each environment, or -1. One that has just finished still has its index.
      reward: `[B]` float64, received on arriving at the row; 0 after a reset.
      action: `[B, ...]`, the action that led to the row, as it was executed; without meaning after a reset.
      value: `[B]`, the policy's estimate of the return from here; None: it was not asked for, or there is none.
      ended: `[B]` bool, whether the episode ends with this row.
    """

    episode: np.ndarray
    reward: np.ndarray
    action: Nest
    value: np.ndarray | None
    ended: np.ndarray


class Recorder(contextlib.AbstractContextManager):
    """Films the first episodes of an evaluation, from their first frame to their true final one.

    A film shows `num_tiles` episodes at once, as a grid; an episode that has ended keeps its last frame. The episodes
    of a film must begin at once: they are the first ones, or there is one environment and one tile. The end of the
    context removes a film that is not complete.

    Args:
      camera: of the evaluation's environments.
      num_episodes: number of episodes to film, a multiple of `num_tiles`.
      num_tiles: number of episodes of one film.
      path: returns the file of a film, from its first episode and the mean return of its episodes.
      setting: name of the films in messages.
      captions: whether frames show reward, return, value and action.

    Attributes:
      written: films, each with its number of frames.
    """

    def __init__(
        self,
        camera: Camera,
        num_episodes: int,
        num_tiles: int,
        path: Callable[[int, float], Path],
        setting: str,
        captions: bool = False,
    ):
        self._camera, self._num_episodes, self._num_tiles, self._path = camera, num_episodes, num_tiles, path
        self._setting, self.captions = setting, captions
        self._first = -1  # episode of the film under way
        self._file: FilmFile | None = None
        self._tiles: list[np.ndarray] = []
        self._returns, self._lengths, self._ended = (np.zeros(num_tiles) for _ in range(3))
        self.written: list[tuple[Path, int]] = []

    @classmethod
    def into_run(
        cls, camera: Camera, root_dir: Path, stem: str, num_episodes: int, setting: str, captions: bool
    ) -> "Recorder":
        """Returns a recorder of one film in a run's directory `films`, whose name has episodes and mean return.

        Args:
          root_dir: of the run.
          stem: beginning of the name: what was evaluated.
          num_episodes: number of episodes, shown at once.
          camera, setting, captions: as those of the class.
        """
        episodes = "episode-0" if num_episodes == 1 else f"episodes-0-{num_episodes - 1}"

        def path(first: int, return_: float) -> Path:
            return root_dir / FILMS / f"{stem}-{episodes}-return-{return_:.2f}.mp4"

        return cls(camera, num_episodes, num_episodes, path, setting, captions)

    def __call__(self, row: Row) -> None:
        """Adds a frame of the film under way; rows of other episodes are ignored."""
        shown = {int(k): lane for lane, k in enumerate(row.episode) if 0 <= k < self._num_episodes}
        if not shown:
            return
        first = min(shown) // self._num_tiles * self._num_tiles
        is_new = self._file is None
        if is_new:
            self._begin(first)
        tiles = [k - self._first for k in shown]
        frames = self._camera.frames(list(shown.values()))
        if is_new:
            self._tiles = [np.zeros_like(frames[0])] * self._num_tiles
        for tile, lane, frame in zip(tiles, shown.values(), frames):
            self._returns[tile] += row.reward[lane]
            self._tiles[tile] = captioned(frame, self._lines(row, tile, lane)) if self.captions else frame
            self._lengths[tile] += 1
            self._ended[tile] = row.ended[lane]
        assert self._file is not None
        self._file.append(grid(self._tiles))
        if self._ended.all():
            path = self._path(self._first, float(self._returns.mean()))
            self._file.finish(path)
            self.written.append((path, self._file.num_frames))
            self._file = None

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            self._file.abandon()
            self._file = None

    def _begin(self, first: int) -> None:
        path = self._path(first, 0.0)
        make_directory(path.parent)
        self._first, self._file = first, FilmFile(path.parent, path.suffix, self._camera.fps, self._setting)
        for sums in (self._returns, self._lengths, self._ended):
            sums[:] = 0

    def _lines(self, row: Row, tile: int, lane: int) -> list[str]:
        numbers = {"return": self._returns[tile], "reward": row.reward[lane]}
        if row.value is not None:
            numbers["value"] = row.value[lane]
        lines = [f"episode {self._first + tile}  step {self._lengths[tile]:.0f}"]
        lines += [f"{name} {significant(float(number))}" for name, number in numbers.items()]
        if self._lengths[tile] > 0:
            action = np.concatenate([np.asarray(leaf[lane]).reshape(-1) for leaf in nest.leaves(row.action)])
            lines.append(f"action {', '.join(format(number, '.3g') for number in action[:8])}")
        return lines


def grid(tiles: Sequence[np.ndarray]) -> np.ndarray:
    """Returns pictures `[H, W, 3]` as one, row by row in a nearly square grid; places without one are black."""
    num_columns = math.ceil(math.sqrt(len(tiles)))
    num_rows = math.ceil(len(tiles) / num_columns)
    height, width, _ = tiles[0].shape
    places = np.zeros((num_rows * num_columns, height, width, 3), np.uint8)
    places[: len(tiles)] = tiles
    rows = places.reshape(num_rows, num_columns, height, width, 3)
    return rows.swapaxes(1, 2).reshape(num_rows * height, num_columns * width, 3)
