"""Leagues: snapshots of policies as opponents, and policies that train in turn.

The two listeners are called before other listeners, so that checkpoints contain their changes.
"""

import copy
from typing import Any

import gin

from alfish.errors import UsageError
from alfish.parameters import PositiveInt, checked
from alfish.policies.joint_unroller import JointUnroller
from alfish.policies.member import Member
from alfish.training.clock import next_due
from alfish.training.listener import Listener, Report, Run


class _PeriodicListener(Listener):
    """Changes the policies of a run every `period` clock steps; subclasses define the change."""

    changes_algorithm = True

    def __init__(self, period: int):
        self._period = self._next = period
        self._num_done = 0

    def start(self, run: Run) -> None:
        self._next = next_due(run.clock.value, self._period, self._next)

    def after_iteration(self, run: Run, report: Report) -> None:
        if report.clock >= self._next:
            self._next = next_due(report.clock, self._period)
            self._num_done += 1
            self.change(run, self._num_done)

    def change(self, run: Run, number: int) -> None:
        """Makes change `number`; the first change is number 1."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "num_done": self._num_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._num_done = state["next"], state["num_done"]


@gin.configurable(module="alfish")
@checked
class Snapshots(_PeriodicListener):
    """Copies policies into their snapshots (`PolicySettings.snapshot_of`), replacing the oldest snapshot first.

    A snapshot has the weights, buffers and transform statistics of the policy at the time of the copy. When a run
    begins, all snapshots are copies of the new policy. A running game continues with the new weights. Checkpoints
    contain snapshots, so a resumed run plays against the same snapshots.

    Args:
      period: number of clock steps between two copies of a policy.
    """

    def __init__(self, period: PositiveInt = gin.REQUIRED):
        super().__init__(period)
        self._has_begun = False

    def start(self, run: Run) -> None:
        super().start(run)
        slots = self._slots(run)
        if not slots:
            raise UsageError(
                "Snapshots has no snapshots to write; bind PolicySettings.snapshot_of of one policy or more, as in "
                "Trainer.policies = {'main': '*', 'past': ('*', 4)} and past/PolicySettings.snapshot_of = 'main'"
            )
        if not self._has_begun:
            for source, own in slots:
                for slot in own:
                    _copy(source, slot)
            self._has_begun = True

    def change(self, run: Run, number: int) -> None:
        for source, own in self._slots(run):
            slot = own[(number - 1) % len(own)]
            _copy(source, slot)
            run.log(f"{slot.name} is now {source.name} of {run.clock.value:,} steps")

    def _slots(self, run: Run) -> list[tuple[Member, list[Member]]]:
        """Returns each policy that has snapshots, with its snapshots."""
        members = _members(run, "Snapshots")
        of = [(one, [slot for slot in members if slot.snapshot_of == one.name]) for one in members]
        return [(source, own) for source, own in of if own]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "has_begun": self._has_begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._has_begun = state["has_begun"]


@gin.configurable(module="alfish")
@checked
class AlternateTraining(_PeriodicListener):
    """Trains one policy at a time, in turn; the other policies act with unchanged weights and statistics.

    The clock counts the steps of the policy that trains. The warm-up of a policy and its number of updates depend on
    its steps while it trains; its replay stores all its steps.

    Args:
      period: number of clock steps of a policy's turn.
    """

    def __init__(self, period: PositiveInt = gin.REQUIRED):
        super().__init__(period)

    def start(self, run: Run) -> None:
        super().start(run)
        trained = self._trained(run)
        if len(trained) < 2:
            raise UsageError(
                f"AlternateTraining needs two policies that train, and here there is {trained[0].name} only; leave the "
                "listener out"
            )
        self.change(run, self._num_done)

    def change(self, run: Run, number: int) -> None:
        trained = self._trained(run)
        for place, member in enumerate(trained):
            member.is_training = place == number % len(trained)

    def _trained(self, run: Run) -> list[Member]:
        return [member for member in _members(run, "AlternateTraining") if member.trains]


def check_snapshots(run: Run) -> None:
    """Raises UsageError if a run has snapshots that nothing writes."""
    members = run.unroller.members if isinstance(run.unroller, JointUnroller) else ()
    unwritten = [member for member in members if member.snapshot_of is not None]
    if unwritten and not any(isinstance(listener, Snapshots) for listener in run.listeners):
        raise UsageError(
            f"{unwritten[0].name} is a snapshot of {unwritten[0].snapshot_of}, and nothing writes the snapshot; bind "
            "Trainer.extra_listeners = [@Snapshots()] and Snapshots.period"
        )


def _members(run: Run, name: str) -> tuple[Member, ...]:
    if not isinstance(run.unroller, JointUnroller):
        raise UsageError(
            f"{name} is for several policies, and this run has one; leave the listener out, or set Trainer.policies"
        )
    return run.unroller.members


def _copy(source: Member, slot: Member) -> None:
    """Copies the networks and the transforms of a policy into its snapshot."""
    for part, own in ((source.algorithm, slot.algorithm), (source.transforms, slot.transforms)):
        own.load_state_dict(copy.deepcopy(part.state_dict()))
