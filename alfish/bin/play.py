"""Plays episodes of a run's policy, and films them on request.

  alfish play --root_dir=runs/ppo
  alfish play --root_dir=runs/ppo --num_episodes=3 --video=cartpole.mp4
  alfish play --root_dir=runs/ppo --num_episodes=4 --video=four.mp4 --grid --captions
  alfish play --root_dir=runs/ppo --beside=runs/a2c --video=both.mp4

Filming needs no screen, because the environment renders to arrays. MuJoCo renders through EGL or OSMesa (MUJOCO_GL
selects one), with the tracking camera if the model has one. A film shows an episode from its first frame to its true
final frame. With several episodes, the name of each film has the number of its episode; --grid shows all episodes in
one film, side by side. --beside shows the policy of another run to the right, on episodes with the same seeds. A film
appears under its name when it is complete. Films need the extra 'video': pip install 'alfish[video]'. --lineup names
the policies of agents in games: --lineup='agent_*=random'.
"""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from absl import flags

from alfish.bin import shared_flags
from alfish.errors import UsageError, significant

FLAGS = flags.FlagValues()
shared_flags.define_episodes(FLAGS, 1)
shared_flags.define_lineup(FLAGS)
shared_flags.define_code(FLAGS)
flags.DEFINE_string("video", None, "File of the film, .mp4 or .gif.", flag_values=FLAGS)
flags.DEFINE_boolean("grid", False, "Film all episodes at once, side by side in one file.", flag_values=FLAGS)
shared_flags.define_captions(FLAGS)
words = "Directory of another run, shown to the right on episodes with the same seeds; repeatable."
flags.DEFINE_multi_string("beside", [], words, flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    shared_flags.check_root_dir(flag_values.root_dir)
    video = Path(flag_values.video) if flag_values.video else None
    if video:
        _check(video, 1 if flag_values.grid else flag_values.num_episodes)
    if not flag_values.beside:
        for film, count in _play(flag_values, flag_values.root_dir, video):
            print(f"{film}: {count} frames")
        return 0
    if video is None or video.suffix != ".mp4":
        raise UsageError("--beside shows runs side by side in a film; give its name by --video=NAME.mp4")
    from alfish.runs.film_file import side_by_side

    columns = []
    with tempfile.TemporaryDirectory(prefix="alfish-films-") as place:
        for number, root_dir in enumerate([flag_values.root_dir, *flag_values.beside]):
            print(f"{root_dir}:")
            columns.append(_play(flag_values, root_dir, Path(place, str(number), video.name)))
        for films in zip(*columns):
            target = video.with_name(films[0][0].name)
            side_by_side([film for film, _ in films], target, f"--video={video}")
            print(f"{target}: {max(count for _, count in films)} frames")
    return 0


def _play(flag_values: flags.FlagValues, root_dir: str, video: Path | None) -> list[tuple[Path, int]]:
    """Plays the episodes of a run and prints their returns; returns the films, each with its number of frames."""
    from alfish.configuration.opening import open_run
    from alfish.training.films import Camera, Recorder

    num_episodes = flag_values.num_episodes
    num_tiles = num_episodes if flag_values.grid else 1
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(open_run(root_dir, *shared_flags.run(flag_values)[1:]))
        env_steps = trainer.load_policy(shared_flags.checkpoint(flag_values.checkpoint))
        # If each film shows one episode, only one environment runs at a time, to keep frames in order.
        arguments: dict[str, Any] = {"render_mode": "rgb_array"} if video else {}
        arguments |= shared_flags.lineup(flag_values)
        evaluator = trainer.evaluator(num_episodes, num_tiles, flag_values.max_length, **arguments)
        stack.callback(evaluator.close)
        if video and num_tiles < evaluator.environment.num_envs:
            raise UsageError(
                f"{evaluator.environment.name} runs all episodes at once; film them side by side (--grid), or film a "
                "single one (--num_episodes=1)"
            )
        recorder = None
        if video:
            camera, setting = Camera(evaluator.environment, "--video"), f"--video={flag_values.video}"

            def path(first: int, return_: float, video: Path = video) -> Path:
                return _path(video, first if num_tiles < num_episodes else None)

            recorder = Recorder(camera, num_episodes, num_tiles, path, setting, flag_values.captions)
            stack.enter_context(recorder)
        evaluation = evaluator.evaluate(
            num_episodes, flag_values.seed, flag_values.sample, env_steps, recorder, flag_values.captions
        )
    for k, (value, length) in enumerate(zip(evaluation.returns, evaluation.lengths)):
        print(f"episode {k} (seed {flag_values.seed + k}): return {significant(value)} in {length} steps")
    return recorder.written if recorder else []


def _path(video: Path, episode: int | None) -> Path:
    """Returns the path of a film; its name has the number of the episode unless `episode` is None."""
    return video if episode is None else video.with_name(f"{video.stem}-{episode}{video.suffix}")


def _check(video: Path, num_films: int) -> None:
    """Raises UsageError if the films cannot be written at `video`, or the extra 'video' is missing."""
    from alfish.environments import rendering
    from alfish.runs.film_file import SUFFIXES, check_extra

    if video.suffix not in SUFFIXES:
        raise UsageError(f"--video is {str(video)!r}; its name must end in .mp4 or .gif")
    check_extra("--video")
    for film in [_path(video, k if num_films > 1 else None) for k in range(num_films)]:
        if film.is_dir():
            raise UsageError(f"--video={film} is a directory; give the path of a file")
    try:
        video.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--video={video} cannot be written: {error.strerror}; choose another directory") from error
    rendering.prepare()
