"""Flags of commands that train a group of runs, and the processes of these runs."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from alfish.bin import shared_flags
from alfish.errors import counted
from alfish.runs.stop_signals import StopSignals, exit_status

if TYPE_CHECKING:
    from alfish.sweeps.group import RunGroup, Specification
    from alfish.sweeps.jobs import Jobs


def define_group(flag_values: flags.FlagValues, group: str) -> None:
    """Defines the flags of commands for groups of runs; `group` names the group, such as 'sweep'."""
    words = "Gin file; repeatable, later files override earlier ones."
    flags.DEFINE_multi_string("gin_file", [], words, flag_values=flag_values)
    words = "One binding for all runs, such as 'PPO.gamma=0.98'; repeatable, overrides files."
    flags.DEFINE_multi_string("gin_param", [], words, flag_values=flag_values)
    flags.DEFINE_string("root_dir", None, f"Directory of the {group}; created if needed.", flag_values=flag_values)
    words = "Number of last evaluations of a run; their mean is the run's value; default: 1."
    flags.DEFINE_integer("last", None, words, 1, flag_values=flag_values)
    words = (
        "Scalar of the evaluations that is the value of a run, larger is better: evaluation/mean_return (the default), "
        "evaluation/mean_return/NAME for an entry of a vector reward or a policy of a game, or "
        "evaluation/env_info/NAME for a number in the infos, such as evaluation/env_info/success."
    )
    flags.DEFINE_string("objective", None, words, flag_values=flag_values)
    words = "Number of runs at the same time; default: one per core of the machine, or of the cluster with --ray."
    flags.DEFINE_integer("jobs", None, words, 1, flag_values=flag_values)
    flags.DEFINE_boolean("ray", False, "Train the runs on a Ray cluster.", flag_values=flag_values)
    words = "With --ray: processor cores that are reserved for each run."
    flags.DEFINE_float("cpus_per_run", 1.0, words, 1e-3, flag_values=flag_values)
    words = "With --ray: GPUs, or a fraction of one, for each run."
    flags.DEFINE_float("gpus_per_run", 0.0, words, 0.0, flag_values=flag_values)
    flags.DEFINE_multi_string("allow_import", [], shared_flags.ALLOW_IMPORT, flag_values=flag_values)


@contextlib.contextmanager
def processes(flag_values: flags.FlagValues) -> Iterator["Jobs"]:
    """Yields the object that starts processes. At the end, unfinished runs save checkpoints and stop."""
    from alfish.sweeps.jobs import LocalJobs, num_cores

    jobs: Jobs
    if flag_values.ray:
        from alfish.sweeps.ray_jobs import RayJobs

        jobs = RayJobs(flag_values.jobs, flag_values.cpus_per_run, flag_values.gpus_per_run)
    else:
        jobs = LocalJobs(flag_values.jobs or num_cores())
    try:
        yield jobs
    finally:
        if jobs.running:
            log(f"{counted(len(jobs.running), 'run')} will save a checkpoint and end; Ctrl-C ends them at once")
        jobs.close()


def train_group(
    group: "type[RunGroup[Any]]",
    specification: "type[Specification]",
    directory: Path,
    flag_values: flags.FlagValues,
    report: Callable[[Path, Any], None],
) -> int:
    """Trains a group of runs, and returns the exit status of the command.

    Args:
      group, specification: classes of the group and its specification.
      directory: directory of the group.
      flag_values: values of the flags, including the flags of `define_group` and a flag for each field of the
        specification.
      report: function that is called with the directory and the specification when the group is complete.
    """
    from alfish.sweeps.group import locked

    names = [field.name for field in dataclasses.fields(specification) if field.name in flag_values]
    given = {name: flag_values[name].value for name in names}
    with locked(directory), StopSignals(lambda: None) as signals:
        with processes(flag_values) as jobs:  # first, so that nothing is written if there is no Ray cluster
            whole = specification.open(
                directory, flag_values.gin_file, flag_values.gin_param, given, flag_values.allow_import
            )
            group(directory, whole, jobs, signals, log).run()
        if signals.number is not None:
            log(f"{signals.name}: stopped; run the same command again to continue")
            return exit_status(signals.number)
        report(directory, whole)
    return 0


def log(line: str) -> None:
    """Prints a line about the group of runs."""
    print(line, file=sys.stderr, flush=True)
