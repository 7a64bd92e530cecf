"""Trains the beginning of a run again, and compares the result with a checkpoint of the run, bit by bit.

  alfish verify --root_dir=runs/ppo                       # up to the first checkpoint that the run keeps
  alfish verify --root_dir=ppo.zip --checkpoint=latest    # a packed run, up to its newest checkpoint

The run's configuration is trained again in a temporary directory, up to the steps of the checkpoint. Parameters,
statistics of transforms and the state of the learner (optimizers, schedules) must then equal those of the checkpoint,
bit by bit. If so, the exit status is 0, otherwise 1. The report lists the values that differ and by how much, the first
evaluation that differs, and changed conditions: versions, machine, device, threads, revision.

The verification takes the time of the training, and the listeners of the configuration are called as in the run. Runs
with AsyncUnroller can be repeated only in its mode 'lockstep'. Runs with the budget wall_seconds cannot be repeated.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from alfish.bin import shared_flags, show
from alfish.errors import UsageError, counted

FLAGS = flags.FlagValues()
flags.DEFINE_string("root_dir", None, "Directory of the run, or a packed run.", flag_values=FLAGS)
flags.DEFINE_string(
    "checkpoint",
    "first",
    "Checkpoint to compare with: first (the first one that the run keeps), latest, best, or a number of steps.",
    flag_values=FLAGS,
)
flags.DEFINE_multi_string("allow_import", [], shared_flags.ALLOW_IMPORT, flag_values=FLAGS)
shared_flags.define_code(FLAGS)

COMPARED = ("algorithm", "transforms", "learner")  # entries of a trainer's state that must be equal
NUM_SHOWN = 5  # number of printed differences


def main(flag_values: flags.FlagValues) -> int:
    shared_flags.check_root_dir(flag_values.root_dir)
    from alfish.configuration.directory import run_directory
    from alfish.runs.checkpoints import checkpoints_of
    from alfish.runs.packed.fetching import as_directory

    with as_directory(flag_values.root_dir) as place, tempfile.TemporaryDirectory(prefix="alfish-verify-") as temporary:
        directory, again = run_directory(place), Path(temporary) / "run"
        checkpoints = checkpoints_of(directory)
        which = _checkpoint(flag_values.checkpoint, checkpoints.steps())
        steps, saved = checkpoints.load(which, mmap=True)
        status = _train(directory, again, steps, flag_values.allow_import)
        if status is not None:
            return status
        found = checkpoints_of(again).load(steps, mmap=True)[1]
        different = list(differences(saved, found))
        if not different:
            show(f"{flag_values.root_dir} can be repeated here: after {steps:,} steps, all values are bitwise equal")
            return 0
        show(f"{flag_values.root_dir} cannot be repeated here: after {steps:,} steps, {len(different)} values differ")
        rest = len(different) - NUM_SHOWN
        lines = [*different[:NUM_SHOWN], *([f"and {counted(rest, 'other value')}"] if rest > 0 else [])]
        lines += [*_first_evaluation(directory, again), *_other_conditions(directory, again, steps)]
        show("\n".join(f"  {line}" for line in lines))
        return 1


def _checkpoint(name: str, steps: list[int]) -> str | int:
    """Returns the argument of `Checkpoints.load` for `name`, the value of --checkpoint."""
    if name == "first":
        return steps[0] if steps else "latest"  # loading raises the error that there is no checkpoint
    return shared_flags.checkpoint(name)


def _train(directory: Path, again: Path, steps: int, allow_import: list[str]) -> int | None:
    """Trains a run's configuration in the directory `again`; returns an exit status if a signal ended training."""
    from alfish.configuration.runs import configured_run
    from alfish.parameters.description import CONFIG_FILE
    from alfish.runs import trust
    from alfish.runs.stop_signals import exit_status

    config = directory / CONFIG_FILE
    if not config.is_file():
        raise UsageError(f"{directory} has no {CONFIG_FILE}, so its training cannot be repeated by a command")
    bindings = [f"Trainer.stop_at = {steps}"]
    with (
        trust.restricted(config, allow_import),
        configured_run(again, [str(config)], bindings, allow_import=allow_import) as trainer,
    ):
        if trainer.clock.budget.name == "wall_seconds":
            raise UsageError(
                f"the budget of {directory} is Trainer.wall_seconds, and its schedules follow the time, so the run "
                "cannot be repeated; use a budget in steps, iterations or updates"
            )
        trainer.train()
        if trainer.interrupted_by is not None:
            return exit_status(trainer.interrupted_by)
        if trainer.clock.value != steps:
            raise UsageError(
                f"the training ended at {trainer.clock.value:,} steps, and the checkpoint of {directory} is at "
                f"{steps:,}: another configuration wrote it; compare {CONFIG_FILE} with provenance.json"
            )
    return None


def differences(saved: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each value that differs between the states of a run and of its repetition.

    Args:
      saved, found: states of a Trainer; their entries `COMPARED` are compared.
    """
    from alfish import nest

    there, here = (
        {name: leaf for part in COMPARED for name, leaf in nest.named_leaves(state[part], part)}
        for state in (saved, found)
    )
    for name in {**there, **here}:
        if name not in here or name not in there:
            yield f"{name} is missing {'here' if name in there else 'in the checkpoint'}"
        elif not _has_equal_bits(there[name], here[name]):
            yield f"{name}: {_difference(there[name], here[name])}"


def _has_equal_bits(one: Any, other: Any) -> bool:
    import torch

    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _difference(one: Any, other: Any) -> str:
    """Describes the difference between a value of the checkpoint and of the repeated training."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape == other.shape and one.dtype == other.dtype:
            differs = ~torch.isclose(one, other, rtol=0, atol=0, equal_nan=True)
            if not differs.any():
                return "only the signs of zeros, or the bits of nan, differ"
            largest = (one[differs].double() - other[differs].double()).abs().max().item()
            return f"{differs.double().mean().item():.0%} of the entries differ, by at most {largest:.2g}"
        one, other = (f"{list(value.shape)} {value.dtype}" for value in (one, other))
    return f"{one!r} in the checkpoint, {other!r} here"


def _first_evaluation(directory: Path, again: Path) -> Iterator[str]:
    """Yields a line for the first evaluation whose results differ between the run and its repetition."""
    from alfish.runs import contents

    for path in sorted((again / "eval").glob("*.csv")):
        saved = contents.content(directory, f"eval/{path.name}")
        if saved not in (None, path.read_bytes()):
            yield f"the first evaluation that differs is eval/{path.name}"
            return


def _other_conditions(directory: Path, again: Path, steps: int) -> Iterator[str]:
    """Yields a line for each condition that differs between the first start of the run and this process."""
    from alfish.runs import contents

    starts = contents.json_value(directory, "provenance.json")
    starts = [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
    here = contents.json_value(again, "provenance.json")[0]
    for name in ("versions", "machine", "device", "num_threads", "git"):
        if starts and starts[0].get(name) != here[name]:
            yield f"{name}: {starts[0].get(name)} in the run, {here[name]} here"
    began = [start.get("steps") for start in starts[1:]]
    resumed = ", ".join(f"{one:,}" for one in began if isinstance(one, int) and 0 < one < steps)
    if resumed:
        yield f"the run was resumed at {resumed} steps; environments that save no state then begin new episodes"
