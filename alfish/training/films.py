"""Films of episodes: frames, captions, recorders that an evaluator calls, and the schedule of filmed evaluations."""

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alfish import nest
from alfish.environments import Environment, VectorEnvironment, rendering
from alfish.environments.games import Games
from alfish.environments.games.zoo import ZooGames
from alfish.environments.members import single_environments
from alfish.errors import UsageError, significant
from alfish.errors.user_code import calling, refuse
from alfish.nest import Nest
from alfish.runs.files import make_directory
from alfish.runs.film_file import FilmFile, check_extra
from alfish.training.clock import next_due

SHADE = 0.35  # factor by which the picture behind the text is darkened
FILMS = "films"  # directory of films in a run's directory
SETTING = "Evaluate.video_period"


def captioned(frame: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """Returns a frame `[H, W, 3]` uint8 with white text on a darker background in its upper left corner."""
    from PIL import Image, ImageDraw, ImageFont  # imported here, because it comes with imageio, an extra

    size = max(10, min(frame.shape[:2]) // 24)
    font, text = ImageFont.load_default(size), "\n".join(lines)
    picture = Image.fromarray(np.ascontiguousarray(frame))
    draw = ImageDraw.Draw(picture)
    right, bottom = (int(end) + size // 2 for end in draw.multiline_textbbox((0, 0), text, font=font)[2:])
    box = (0, 0, min(right, picture.width), min(bottom, picture.height))
    picture.paste(picture.crop(box).point(lambda value: int(value * SHADE)), box)
    draw.multiline_text((size // 4, 0), text, fill="white", font=font)
    return np.asarray(picture)


class Camera:
    """Renders environments built with the render mode 'rgb_array'. In MuJoCo the tracking camera is used.

    Args:
      environment: environments or games of an evaluation.
      setting: name of the setting that requests the film, for messages, such as `--video`.

    Attributes:
      fps: number of frames per second of time in the environment.

    Raises:
      UsageError: the environment computes in tensors, or does not render arrays.
    """

    def __init__(self, environment: Environment | Games, setting: str):
        self._name = environment.name
        if isinstance(environment, ZooGames):
            self._env, self._singles = environment.games[0], environment.games
        elif isinstance(environment, VectorEnvironment):
            self._env, self._singles = environment.env, single_environments(environment.env)
            for single in self._singles:
                rendering.follow(single)
        else:
            raise UsageError(f"{setting} can film environments of gymnasium and PettingZoo, but not {environment.name}")
        members: Sequence[Any] = self._singles if self._singles else [self._env]
        if any(getattr(member, "render_mode", None) != "rgb_array" for member in members):
            raise UsageError(
                f"{setting} needs frames, but {environment.name} renders none with render_mode='rgb_array'; give its "
                "class an argument render_mode, an attribute of that name, and a method render"
            )
        self.fps = float(self._env.metadata.get("render_fps") or 30)
        self._size: tuple[int, ...] | None = None

    def frames(self, lanes: Sequence[int]) -> list[np.ndarray]:
        """Returns the present frames of the environments `lanes`, each `[H, W, 3]` uint8, always of the same size.

        Raises:
          UsageError: an environment does not return such a frame.
        """
        if not self._singles:
            with calling(f"{self._name}.render"):
                rendered: Any = self._env.render()
            return self._of_lanes(rendered, lanes)
        return [self._checked(self._render(self._singles[lane])) for lane in lanes]

    def _of_lanes(self, rendered: Any, lanes: Sequence[int]) -> list[np.ndarray]:
        """Returns frames from the output of a vector class, a sequence or an array `[B, H, W, 3]`."""
        count = None if rendered is None else len(rendered)
        if count not in (None, 0, self._env.num_envs):
            raise UsageError(
                f"{self._name}.render returned {count} frames for {self._env.num_envs} environments; it must return "
                "one for each, as a list or an array [B, height, width, 3]"
            )
        return [self._checked(rendered[lane] if count else None) for lane in lanes]

    def _render(self, env: Any) -> Any:
        try:
            return env.render()
        except Exception as error:
            if (failure := rendering.failure(env, error)) is not None:
                raise failure from error
            refuse(error, f"{self._name}.render")
            raise

    def _checked(self, frame: Any) -> np.ndarray:
        if frame is None:
            raise UsageError("the environment renders no frames with render_mode='rgb_array'")
        array = np.asarray(frame)
        shape = array.shape[:2]
        is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
        if not is_image or array.dtype != np.uint8 or min(shape) < 2 or shape != (self._size or shape):
            asked = "an array [height, width, 3] of uint8, at least 2 x 2, always of the same size"
            raise UsageError(
                f"the environment renders {array.dtype} of shape {list(array.shape)} with render_mode='rgb_array'; it "
                f"must be {asked}"
            )
        self._size = shape
        colours = array[:, :, None] if array.ndim == 2 else array[:, :, :3]
        return np.broadcast_to(colours, (*shape, 3))


class FilmRow(NamedTuple):
    """The rows of an evaluation after a reset or a step of its environments.

    Attributes:
      episode: number of each environment's episode, or -1, `[B]` int. An episode that has just finished still has its
        number.
      reward: reward received on arriving at the row, `[B]` float64; 0 after a reset.
      action: executed action that led to the row, `[B, ...]`; undefined after a reset, None in games.
      value: policy's estimate of the return after this row, `[B]`; None if it was not requested, or the policy has no
        estimate.
      ended: whether the episode of each environment ends with this row, `[B]` bool.
    """

    episode: np.ndarray
    reward: np.ndarray
    action: Nest
    value: np.ndarray | None
    ended: np.ndarray


class Recorder(contextlib.AbstractContextManager):
    """Films the first episodes of an evaluation, from their first frame to their true final frame.

    A film shows `num_tiles` episodes as a grid; an episode that has ended keeps its last frame. The episodes of a film
    must begin at the same time. Therefore a film shows the first episodes, or there is one environment and one tile.
    Leaving the context removes an incomplete film.

    Args:
      camera: camera of the evaluation's environments.
      num_episodes: number of episodes to film, a multiple of `num_tiles`.
      num_tiles: number of episodes in one film.
      path: function that returns a film's path, from the number of its first episode and the mean return of its
        episodes.
      setting: name of the setting that requests the films, for messages.
      captions: whether frames show reward, return, value and action.

    Attributes:
      written: written films, each with its number of frames.
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
        self._camera = camera
        self._num_episodes = num_episodes
        self._num_tiles = num_tiles
        self._path = path
        self._setting, self.captions = setting, captions
        self._first = -1  # first episode of the current film
        self._file: FilmFile | None = None
        self._tiles: list[np.ndarray] = []
        self._returns, self._lengths, self._ended = (np.zeros(num_tiles) for _ in range(3))
        self.written: list[tuple[Path, int]] = []

    @classmethod
    def into_run(
        cls, camera: Camera, root_dir: Path, stem: str, num_episodes: int, setting: str, captions: bool
    ) -> "Recorder":
        """Returns a recorder of one film in a run's `films`; its name contains the episodes and their mean return.

        Args:
          root_dir: directory of the run.
          stem: beginning of the file's name, which names the evaluation.
          num_episodes: number of episodes to show side by side.
          camera, setting, captions: arguments of the class.
        """
        episodes = "episode-0" if num_episodes == 1 else f"episodes-0-{num_episodes - 1}"

        def path(first: int, return_: float) -> Path:
            return root_dir / FILMS / f"{stem}-{episodes}-return-{return_:.2f}.mp4"

        return cls(camera, num_episodes, num_episodes, path, setting, captions)

    def __call__(self, row: FilmRow) -> None:
        """Adds a frame to the current film; ignores rows of episodes that are not filmed."""
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

    def _lines(self, row: FilmRow, tile: int, lane: int) -> list[str]:
        numbers = {"return": self._returns[tile], "reward": row.reward[lane]}
        if row.value is not None:
            numbers["value"] = row.value[lane]
        lines = [f"episode {self._first + tile}  step {self._lengths[tile]:.0f}"]
        lines += [f"{name} {significant(float(number))}" for name, number in numbers.items()]
        if self._lengths[tile] > 0 and row.action is not None:
            action = np.concatenate([np.asarray(leaf[lane]).reshape(-1) for leaf in nest.leaves(row.action)])
            lines.append(f"action {', '.join(format(number, '.3g') for number in action[:8])}")
        return lines


def grid(tiles: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a nearly square grid of pictures `[H, W, 3]`, filled row by row; empty places are black."""
    num_columns = math.ceil(math.sqrt(len(tiles)))
    num_rows = math.ceil(len(tiles) / num_columns)
    height, width, _ = tiles[0].shape
    places = np.zeros((num_rows * num_columns, height, width, 3), np.uint8)
    places[: len(tiles)] = tiles
    rows = places.reshape(num_rows, num_columns, height, width, 3)
    return rows.swapaxes(1, 2).reshape(num_rows * height, num_columns * width, 3)


class FilmSchedule:
    """Schedule of a run's films: one evaluation per period, and the last evaluation if the budget is spent.

    Args:
      period: number of clock steps between evaluations that are filmed, positive.
      num_episodes: number of episodes of a film, side by side.
      captions: whether films show return, reward, value and action.

    Attributes:
      next: clock steps from which the next evaluation is filmed; part of a run's state.
      num_episodes, captions: the constructor's arguments.

    Raises:
      UsageError: the extra 'video' is missing.
    """

    def __init__(self, period: int, num_episodes: int, captions: bool):
        check_extra(SETTING)
        rendering.prepare()
        self._period = period
        self.num_episodes = num_episodes
        self.captions = captions
        self.next = period
        self._camera: Camera | None = None

    def start(self, environment: Environment, clock: int) -> None:
        """Prepares filming of an evaluation's environments, from the current clock on.

        Raises:
          UsageError: the environments cannot be filmed.
        """
        self._camera = Camera(environment, SETTING)
        self.next = next_due(clock, self._period, self.next)

    def recorder(self, clock: int, is_last: bool, root_dir: Path, stem: str) -> Recorder | None:
        """Returns the recorder of an evaluation at `clock`, see `Recorder.into_run`; None if no film is due."""
        assert self._camera is not None
        if clock < self.next and not is_last:
            return None
        return Recorder.into_run(self._camera, root_dir, stem, self.num_episodes, SETTING, self.captions)

    def move_on(self, clock: int) -> None:
        """Plans the next film, after a film at `clock`."""
        self.next = next_due(clock, self._period)
