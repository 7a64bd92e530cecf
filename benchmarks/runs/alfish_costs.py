"""Processor seconds of a shipped conf: of its start, of a step of its warm-up, and of a step that trains.

  python -m benchmarks.runs.alfish_costs sac_halfcheetah --seconds=30

Prints one JSON object. The conf trains as `alfish train` trains it, in compiled updates, without evaluations, until
`--seconds` of the processor are spent on steps that train. Seconds are those of all threads and child processes.
"""

import argparse
import json
import os
import tempfile
from typing import Any, NamedTuple

import gin
import torch

import alfish
from alfish.configuration import reading
from alfish.configuration.runs import configured_trainer
from alfish.training.listener import Listener, Report, Run
from alfish.training.listeners import Evaluate

SETTINGS = ["Learner.compile = True", "Trainer.num_threads = 1"]
WARMUP = 1000  # environment steps, in place of the conf's
FIRST_UPDATES = 200  # which compile, and are compared with plain ones


class Reading(NamedTuple):
    """Counters after an iteration."""

    env_steps: int
    seconds: float  # of the processor, since the process began


def processor_seconds() -> float:
    """Returns the user and system seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Costs(Listener):
    """Reads the processor's clock at the beginning and end of warm-up and of training, and then stops the run.

    Args:
      seconds: of the processor, of steps that train.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self.warmup: list[Reading] = []
        self.training: list[Reading] = []

    def after_iteration(self, run: Run, report: Report) -> None:
        now = Reading(report.env_steps, processor_seconds())
        if report.updates == 0:
            self.warmup[1:] = [now]
        elif report.updates >= FIRST_UPDATES and not report.finished:
            self.training[1:] = [now]
            if now.seconds - self.training[0].seconds >= self._seconds:
                run.stop("measured")


def costs(warmup: list[Reading], training: list[Reading]) -> dict[str, float]:
    """Returns the seconds of the start, of a step of warm-up, and of a step that trains.

    Args:
      warmup: the first and the last reading before the first update; without replay none.
      training: two readings.
    """
    warmup_step = _slope(*warmup) if len(warmup) == 2 else 0.0
    step = _slope(*training)
    num_warmup = warmup[-1].env_steps if warmup else 0
    end = training[-1]
    start = end.seconds - num_warmup * warmup_step - (end.env_steps - num_warmup) * step
    return {"start_seconds": start, "warmup_step_seconds": warmup_step, "step_seconds": step}


def _slope(first: Reading, last: Reading) -> float:
    return (last.seconds - first.seconds) / (last.env_steps - first.env_steps)


def warmup_env_steps() -> int:
    """Returns the conf's own steps before the first update; 0 without replay."""
    try:
        return gin.query_parameter("ReplayBatches.warmup_env_steps")
    except ValueError:  # it is not bound
        return 0


def check_compiled(learner: Any) -> None:
    """Raises SystemExit if updates that were to be compiled stayed plain."""
    if learner.state_dict()["fell_back"]:
        raise SystemExit("the updates could not be compiled, and plain ones cost more; the log says why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conf")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--gin_param", action="append", default=[], help="beside the conf")
    arguments = parser.parse_args()
    files = [f"{arguments.conf}.gin"]
    reading.read(files, [])
    own_warmup = warmup_env_steps()
    warmup = [f"ReplayBatches.warmup_env_steps = {min(own_warmup, WARMUP)}"] if own_warmup else []
    found = reading.read(files, [*SETTINGS, *warmup, *arguments.gin_param])
    measured = Costs(arguments.seconds)
    with tempfile.TemporaryDirectory() as root_dir:
        trainer = configured_trainer(root_dir, found)
        kept = [listener for listener in trainer.listeners if not isinstance(listener, Evaluate)]
        trainer.listeners[:] = [*kept, measured]  # the list that the trainer calls
        trainer.train()
    check_compiled(trainer.learner)
    versions = f"alfish {alfish.__version__}, torch {torch.__version__}"
    found_costs = costs(measured.warmup, measured.training)
    print(json.dumps({"warmup_env_steps": own_warmup, **found_costs, "versions": versions}))


if __name__ == "__main__":
    main()
