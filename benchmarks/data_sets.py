"""Records the data sets of the offline results, with the shipped commands.

  python -m benchmarks.data_sets --task=pendulum          data/pendulum/{random,medium,medium-replay,expert}
  python -m benchmarks.data_sets --task=halfcheetah       data/halfcheetah/{random,medium,medium-replay}

expert          whole episodes of a trained SAC, without exploration
medium          whole episodes of a SAC that was stopped early, with exploration
medium-replay   the replay of that SAC
random          uniform random actions

The repository does not contain the data. The command makes them from fixed seeds, and skips data sets that exist.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import alfish


class Task(NamedTuple):
    """Settings for the recording of a task's data sets."""

    conf: str
    expert: list[str] | None  # settings of the run; None: no expert
    medium: list[str]
    num_episodes: int  # of expert and medium
    num_random_steps: int


WIDE = ["MLP.layers = (256, 256)", "CriticEnsemble.layers = (256, 256)"]
TASKS = {
    "pendulum": Task(
        conf="sac_pendulum",
        expert=WIDE,
        # Learns seven times slower, so that replay holds all of the way from random to half good.
        medium=[
            "Trainer.num_env_steps = 16_000",
            "ReplayBatches.capacity = 16_000",
            "ReplayBatches.updates_per_env_step = 0.15",
            *WIDE,
        ],
        num_episodes=100,
        num_random_steps=20_000,
    ),
    "halfcheetah": Task(
        conf="sac_halfcheetah",
        expert=None,
        medium=[],
        num_episodes=20,
        num_random_steps=20_000,
    ),
}
SEED = 100  # of training; results use others
EPISODES_SEED = 10_000  # of the first episode recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--root", default="data")
    arguments = parser.parse_args()
    task, data = TASKS[arguments.task], Path(arguments.root).resolve() / arguments.task
    runs = data / "runs"
    random = [
        f"Trainer.num_env_steps = {task.num_random_steps + 1}",  # a run ends after its first update, not before it
        f"ReplayBatches.capacity = {task.num_random_steps + 1}",
        f"ReplayBatches.warmup_env_steps = {task.num_random_steps}",
    ]
    kinds = {"random": random, "medium": task.medium, "expert": task.expert}
    for name, settings in kinds.items():
        if settings is not None and not (runs / name / "done").is_file():
            chosen = [f"--gin_param={one}" for one in (f"Trainer.seed = {SEED}", *settings)]
            alfish("train", f"--gin_file={task.conf}.gin", f"--root_dir={runs / name}", *chosen)
    episodes = [f"--num_episodes={task.num_episodes}", f"--seed={EPISODES_SEED}"]
    _make(data / "random", "export", f"--root_dir={runs / 'random'}")
    _make(data / "medium-replay", "export", f"--root_dir={runs / 'medium'}")
    _make(data / "medium", "record", f"--root_dir={runs / 'medium'}", "--sample", *episodes)
    if task.expert is not None:
        _make(data / "expert", "record", f"--root_dir={runs / 'expert'}", *episodes)
    for directory in sorted(data.glob("*/data_set.json")):
        alfish("import", f"--source=alfish:{directory.parent}")


def _make(directory: Path, command: str, *options: str) -> None:
    if not directory.is_dir():
        alfish(command, *options, f"--output={directory}")


if __name__ == "__main__":
    main()
