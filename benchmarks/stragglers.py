"""Environment steps per second of learners of which the last one is slow, with and without the cut of stragglers.

    python -m benchmarks.stragglers                # 2 learners: rows of docs/results/stragglers.csv
    python -m benchmarks.stragglers --learners=4

PPO on CartPole with unrolls of 64 rows. A step of the environment waits for 2 ms, and for 6 ms in the last learner, so
that processor cores are idle for most of the time. The learners are processes of this machine, joined by gloo.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from alfish.algorithms.ppo import PPO
from alfish.environments import make_environment
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.processes import replicas
from alfish.training.trainer import Trainer
from alfish.unrollers import SyncUnroller
from benchmarks import PROJECT, processes
from benchmarks.delayed import slow
from benchmarks.replicas import start
from benchmarks.tables import replace_rows

TABLE = PROJECT / "docs" / "results" / "stragglers.csv"
STEP_SECONDS, SLOWER = 0.002, 3
FIELDS = ("learners", "sync_fraction", "env_steps_per_second", "iterations", "seconds", "machine")


def rate(directory: Path, sync_fraction: float | None, seconds: float) -> dict[str, float]:
    """Trains as one of several learners, and returns what all of them did."""
    with replicas.joined():
        step_seconds = STEP_SECONDS * (SLOWER if replicas.rank() == replicas.size() - 1 else 1)
        trainer = Trainer(
            directory,
            algorithm=PPO,
            environment=functools.partial(
                make_environment, functools.partial(slow, "CartPole-v1", step_seconds), num_envs=replicas.size()
            ),
            unroller=functools.partial(SyncUnroller, sync_fraction=sync_fraction),
            batches=functools.partial(EpochBatches, num_epochs=1),
            learner=functools.partial(Learner, compile=False),
            unroll_length=64,
            wall_seconds=seconds,
            listeners=[],
            device="cpu",
        )
        report = trainer.train()
        assert report is not None
    return {
        "env_steps_per_second": round(report.env_steps / report.wall_seconds, 1),
        "iterations": report.iterations,
        "seconds": round(report.wall_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each training")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--learner", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.learner:
        directory, fraction = given.learner.rsplit(":", 1)
        print(json.dumps(rate(Path(directory), float(fraction) or None, given.seconds)))
        return
    for fraction in (0.0, (given.learners - 1) / given.learners):
        with tempfile.TemporaryDirectory() as directory:
            command = ["-m", "benchmarks.stragglers", f"--learner={directory}:{fraction}", f"--seconds={given.seconds}"]
            learners = start(command, given.learners, cwd=PROJECT, stdout=subprocess.PIPE)
            outputs = [learner.communicate()[0] for learner in learners]
        if any(learner.returncode for learner in learners):
            sys.exit("a learner failed; its error is above")
        row = {"learners": given.learners, "sync_fraction": round(fraction, 3) or "none"}
        row |= {**json.loads(outputs[0]), "machine": processes.machine()}
        print(row, flush=True)
        replace_rows(given.table, [row], FIELDS, ("learners", "sync_fraction"))


if __name__ == "__main__":
    main()
