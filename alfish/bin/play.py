"""Plays episodes of a run's policy, and films them if asked.

  alfish play --root_dir=runs/ppo
  alfish play --root_dir=runs/ppo --num_episodes=3 --video=cartpole.mp4

Filming needs no screen: the environment renders to arrays. A film shows each episode from its first frame to its true
final one, the film's name gets the episode's number where there are several. Films need the extra 'video':
pip install 'alfish[video]'.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from alfish.bin.evaluate import ALLOW_IMPORT_HELP, CHECKPOINT_HELP, MAX_LENGTH_HELP, checkpoint
from alfish.environments import Environment, VectorEnvironment
from alfish.errors import UsageError
from alfish.formatting import significant

FLAGS = flags.FlagValues()
flags.DEFINE_string("root_dir", None, "Directory of the run.", flag_values=FLAGS)
flags.DEFINE_string("checkpoint", "latest", CHECKPOINT_HELP, flag_values=FLAGS)
flags.DEFINE_integer("num_episodes", 1, "Whole episodes.", 1, flag_values=FLAGS)
flags.DEFINE_integer("seed", 0, "Seed of episode 0.", 0, flag_values=FLAGS)
flags.DEFINE_integer("max_length", None, MAX_LENGTH_HELP, 1, flag_values=FLAGS)
flags.DEFINE_boolean("sample", False, "Sample actions as in training, in place of the mode.", flag_values=FLAGS)
flags.DEFINE_string("video", None, "File to film to, .mp4 or .gif.", flag_values=FLAGS)
flags.DEFINE_string("device", "cpu", "cpu, cuda or cuda:N.", flag_values=FLAGS)
flags.DEFINE_multi_string("allow_import", [], ALLOW_IMPORT_HELP, flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    from alfish.bin.run import open_run

    if not flag_values.root_dir:
        raise UsageError("--root_dir is missing: name a run of `alfish train`")
    film = Film(flag_values.video, flag_values.num_episodes) if flag_values.video else None
    with open_run(flag_values.root_dir, flag_values.device, flag_values.allow_import) as trainer:
        env_steps = trainer.load_policy(checkpoint(flag_values.checkpoint))
        # One environment at a time, so that a film's frames come in order.
        arguments = {"render_mode": "rgb_array"} if film else {}
        evaluator = trainer.evaluator(flag_values.num_episodes, 1, flag_values.max_length, **arguments)
        on_row = film.shoot(evaluator.environment) if film else None
        evaluation = evaluator.evaluate(
            flag_values.num_episodes, flag_values.seed, flag_values.sample, env_steps, on_row
        )
        evaluator.close()
    for k, (value, length) in enumerate(zip(evaluation.returns, evaluation.lengths)):
        print(f"episode {k} (seed {flag_values.seed + k}): return {significant(value)} in {length} steps")
    if film:
        film.close()
        for path, count in film.written:
            print(f"{path}: {count} frames")
    return 0


class Film:
    """Writes one file an episode."""

    def __init__(self, path: str, num_episodes: int):
        self._path = Path(path)
        if self._path.suffix not in (".mp4", ".gif"):
            raise UsageError(f"--video is {path!r}; its name must end in .mp4 or .gif")
        try:
            import imageio.v2
        except ImportError as error:
            raise UsageError("--video needs the extra 'video': pip install 'alfish[video]'") from error
        self._imageio = imageio.v2
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame renders to arrays; it needs no screen
        self._several = num_episodes > 1
        self._episode, self._frames = -1, 0
        self._writer: Any = None
        self.written: list[tuple[Path, int]] = []

    def shoot(self, environment: Environment) -> Any:
        """A function for `Evaluator.evaluate` that films the first of the environments."""
        if not isinstance(environment, VectorEnvironment):
            raise UsageError("--video films environments of gymnasium, and this run's return tensors")
        env = environment.env
        fps = env.metadata.get("render_fps", 30)

        def on_row(episode: np.ndarray) -> None:
            if episode[0] < 0:
                return
            if episode[0] != self._episode:
                self._next(int(episode[0]), fps)
            frames = env.render()
            if not frames or frames[0] is None:
                raise UsageError("the environment renders no frames with render_mode='rgb_array'")
            self._writer.append_data(_even(np.asarray(frames[0])))
            self._frames += 1

        return on_row

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self.written.append((self._current, self._frames))
            self._writer = None

    def _next(self, episode: int, fps: float) -> None:
        self.close()
        self._episode, self._frames = episode, 0
        name = f"{self._path.stem}-{episode}{self._path.suffix}" if self._several else self._path.name
        self._current = self._path.with_name(name)
        self._current.parent.mkdir(parents=True, exist_ok=True)
        mp4: dict[str, Any] = {"fps": fps, "macro_block_size": 2}
        options = mp4 if self._path.suffix == ".mp4" else {"duration": 1000 / fps}
        self._writer = self._imageio.get_writer(self._current, **options)


def _even(frame: np.ndarray) -> np.ndarray:
    """Video codecs take even heights and widths only."""
    return frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]
