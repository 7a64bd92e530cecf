"""Plays episodes of a run's policy, and films them on request.

  alfish play --root_dir=runs/ppo
  alfish play --root_dir=runs/ppo --num_episodes=3 --video=cartpole.mp4

Filming needs no screen, because the environment renders to arrays. MuJoCo renders through EGL or OSMesa (MUJOCO_GL
selects one), with the tracking camera if the model has one. A film shows an episode from its first frame to its true
final frame. With several episodes the number of the episode is added to the name of each film. A film appears under its
name when it is complete. Films need the extra 'video': pip install 'alfish[video]'.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from alfish.bin import shared_flags
from alfish.environments import Environment, VectorEnvironment, rendering
from alfish.environments.members import single_environments
from alfish.errors import RunError, UsageError, first_line
from alfish.formatting import significant

FLAGS = flags.FlagValues()
shared_flags.define_episodes(FLAGS, 1)
flags.DEFINE_string("video", None, "File of the film, .mp4 or .gif.", flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    from alfish.configuration.opening import open_run

    if not flag_values.root_dir:
        raise UsageError("--root_dir is missing: name a run of `alfish train`")
    with contextlib.ExitStack() as stack:
        film = Film(flag_values.video, flag_values.num_episodes) if flag_values.video else None
        trainer = stack.enter_context(
            open_run(flag_values.root_dir, flag_values.device, allow_import=flag_values.allow_import)
        )
        env_steps = trainer.load_policy(shared_flags.checkpoint(flag_values.checkpoint))
        # One environment at a time, so that a film's frames come in order.
        arguments = {"render_mode": "rgb_array"} if film else {}
        evaluator = trainer.evaluator(flag_values.num_episodes, 1, flag_values.max_length, **arguments)
        stack.callback(evaluator.close)
        on_row = stack.enter_context(film).shoot(evaluator.environment) if film else None
        evaluation = evaluator.evaluate(
            flag_values.num_episodes, flag_values.seed, flag_values.sample, env_steps, on_row
        )
    for k, (value, length) in enumerate(zip(evaluation.returns, evaluation.lengths)):
        print(f"episode {k} (seed {flag_values.seed + k}): return {significant(value)} in {length} steps")
    if film:
        for path, count in film.written:
            print(f"{path}: {count} frames")
    return 0


class Film(contextlib.AbstractContextManager):
    """Writes one file for each episode; the end of the context completes the last one.

    A file appears under its name when it is complete.

    Args:
      path: of the film; several films are numbered.
      num_episodes: number of episodes to film.

    Attributes:
      written: files, each with its number of frames.

    Raises:
      UsageError: no film can be written to `path`, or the extra 'video' is missing.
    """

    def __init__(self, path: str, num_episodes: int):
        self._path = Path(path)
        if self._path.suffix not in (".mp4", ".gif"):
            raise UsageError(f"--video is {path!r}; its name must end in .mp4 or .gif")
        try:
            import imageio.v2
        except ImportError as error:
            raise UsageError("--video needs the extra 'video': pip install 'alfish[video]'") from error
        self._imageio = imageio.v2
        self._several = num_episodes > 1
        for episode in range(num_episodes):
            if self._name(episode).is_dir():
                raise UsageError(f"--video={self._name(episode)} is a directory; name a file")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--video={path} cannot be written: {error.strerror}; name another directory") from error
        rendering.prepare()
        self._episode, self._frames = -1, 0
        self._size: tuple[int, ...] | None = None
        self._writer: Any = None
        self.written: list[tuple[Path, int]] = []

    def shoot(self, environment: Environment) -> Callable[[np.ndarray], None]:
        """Returns a callback for `Evaluator.evaluate` that films the first environment."""
        if not isinstance(environment, VectorEnvironment):
            raise UsageError("--video films environments of gymnasium, and this run's return tensors")
        env = environment.env
        single = next(iter(single_environments(env)), None)
        if single is not None:
            rendering.follow(single)
        fps = env.metadata.get("render_fps") or 30

        def on_row(episode: np.ndarray) -> None:
            if episode[0] < 0:
                return
            if episode[0] != self._episode:
                self._next(int(episode[0]), fps)
            try:
                frames: Any = env.render()
            except Exception as error:
                if single is not None and (said := rendering.failure(single, error)) is not None:
                    raise said from error
                raise
            if not frames or frames[0] is None:
                raise UsageError("the environment renders no frames with render_mode='rgb_array'")
            with self._named_errors():
                self._writer.append_data(_even(self._checked(frames[0])))
            self._frames += 1

        return on_row

    def _checked(self, frame: Any) -> np.ndarray:
        """Returns the frame as an array, after checking that its size is that of the frames before."""
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
        return array

    def __exit__(self, kind: Any, *others: Any) -> None:
        if kind is None:
            self._finish()
        elif self._writer is not None:
            with contextlib.suppress(OSError):  # the exception that ended the film is being raised
                self._writer.close()
            self._unfinished.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"--video={self._path} cannot be written: {first_line(error)}") from error

    def _name(self, episode: int) -> Path:
        return self._path.with_name(f"{self._path.stem}-{episode}{self._path.suffix}") if self._several else self._path

    @property
    def _unfinished(self) -> Path:
        return self._path.with_name(f".{self._path.stem}.{os.getpid()}.tmp{self._path.suffix}")

    def _next(self, episode: int, fps: float) -> None:
        self._finish()
        self._episode, self._frames, self._size = episode, 0, None
        mp4: dict[str, Any] = {"fps": fps, "macro_block_size": 2}
        options = mp4 if self._path.suffix == ".mp4" else {"duration": 1000 / fps}
        with self._named_errors():
            self._writer = self._imageio.get_writer(self._unfinished, **options)

    def _finish(self) -> None:
        if self._writer is not None:
            with self._named_errors():
                self._writer.close()
                os.replace(self._unfinished, self._name(self._episode))
            self._writer = None
            self.written.append((self._name(self._episode), self._frames))


def _even(frame: np.ndarray) -> np.ndarray:
    """Returns the frame with even height and width, which video codecs require."""
    return frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]
