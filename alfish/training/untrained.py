"""Errors for runs that end without an update or with parameters that are not finite."""

import math
from typing import TYPE_CHECKING

from alfish.errors import RunError, UsageError
from alfish.processes import replicas
from alfish.runs.files import nearest
from alfish.runs.loading import nonfinite

if TYPE_CHECKING:
    from alfish.training.trainer import Trainer


def check_budget(trainer: "Trainer") -> None:
    """Raises UsageError if a budget of steps or iterations will be spent before the first update."""
    clock, batches, unroller = trainer.clock, trainer.batches, trainer.unroller
    name, budget, _ = clock.budget
    if clock.updates or batches.rest() or name not in ("num_env_steps", "num_iterations"):
        return
    rows = unroller.unroll_length * unroller.num_columns * replicas.size()
    num_iterations = budget - clock.iterations if name == "num_iterations" else (budget - clock.env_steps) / rows
    if not batches.updates_until(clock.value + math.ceil(math.ceil(num_iterations) * rows)):
        raise UsageError(
            f"Trainer.{name} is {budget:,}, which ends the run before its first update, so nothing would be trained; "
            f"raise the budget{_remedy(trainer)}"
        )


def check_trained(trainer: "Trainer") -> None:
    """Raises RunError if a finished run has made no update, or if its directory was deleted or moved."""
    clock = trainer.clock
    if not trainer.directory.is_whole:
        raise RunError(
            f"{trainer.directory.path} was deleted or moved during training, so it is incomplete: earlier files, such "
            "as evaluations and checkpoints, are missing"
        )
    if clock.updates:
        return
    name, budget, _ = clock.budget
    if clock.stop_reason is not None:
        end = f"stopped ({clock.stop_reason}); remove {nearest(trainer.directory.path) / 'done'} to continue"
    else:
        is_spent = clock.spent >= budget
        end = f"spent Trainer.{name if is_spent else 'wall_seconds'}; raise it"
    raise RunError(
        f"{nearest(trainer.directory.path)} finished after {clock.value:,} steps without an update, so its policy is "
        f"untrained: the run {end}{_remedy(trainer)}"
    )


def finish(trainer: "Trainer") -> None:
    """Marks a run as finished; raises RunError if parameters are not finite."""
    modules = {"": trainer.algorithm, "transforms.": trainer.transforms}
    if found := [head + name for head, module in modules.items() for name in nonfinite(module, module.state_dict())]:
        raise RunError(
            f"{trainer.directory.path} is finished, but its networks are unusable: {found[0]} has values that are not "
            "finite; check rewards and observations, or lower the learning rate, and train again from the beginning"
        )
    trainer.directory.mark_done(trainer.clock)


def end_of(trainer: "Trainer") -> str:
    """Returns a sentence about a finished run: why it is finished, and how to continue it."""
    name, budget, _ = trainer.clock.budget
    if trainer.clock.stop_reason is not None:
        why = f"{trainer.clock.stop_reason}; remove {nearest(trainer.directory.path) / 'done'} to continue"
    elif trainer.clock.progress < 1:
        why = f"Trainer.wall_seconds is spent before Trainer.{name} = {budget:,}; raise wall_seconds to continue"
    else:
        why = f"Trainer.{name} = {budget:,} is spent; raise it to continue"
    return f"{nearest(trainer.directory.path)} is finished: {why}"


def _remedy(trainer: "Trainer") -> str:
    """Returns the end of a sentence: which settings to lower for an earlier first update; '' if there are none."""
    warmup, needed = trainer.batches.warmup_env_steps, trainer.batches.needed_env_steps
    if needed > warmup:
        return (
            ", or lower ReplayBatches.batch_size, window_length, burn_in or state_period: the first update waits for "
            f"{needed:,} environment steps"
        )
    if not warmup:
        return ""
    return (
        f", or lower ReplayBatches.warmup_env_steps, now {warmup:,}, and ReplayBatches.batch_size, which the first "
        "update waits for"
    )
