"""The training loop: collect rows, store them, update, count."""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler import kernels
from alfish.data import Experience
from alfish.errors import UsageError, first_line
from alfish.metrics import Metrics
from alfish.metrics.episode_sums import StepSums
from alfish.policies.networks import load_networks
from alfish.processes import replicas
from alfish.runs.random_state import rng_state, set_rng_state
from alfish.runs.stop_signals import Interrupted, StopSignals
from alfish.runs.timer import LOOP, Timer
from alfish.training.agreement import Agreement, RunEnded, SharedAgreement
from alfish.training.clock import Clock
from alfish.training.listener import Report
from alfish.training.run_directory import RunDirectory
from alfish.training.run_parts import MAX_THREADS, JointParts, Parts
from alfish.unrollers import StepRecords

# Parts of an iteration; see `Timer`.
COLLECT, METRICS, STORE = "unroll, the rest", "metrics", "batches: storing rows"
SAMPLE, UPDATE = "batches: assembling batches", "updates"


class Loop:
    """Runs the iterations of a training run, one at a time.

    Args:
      parts: parts of the run.
      clock: clock that counts steps, iterations and updates.
      timer: timer of the parts of an iteration.
      signals: signals that may interrupt collecting.
      log: function that receives lines for the user.
      interaction_env_steps: number of environment steps after which acting ends; None means that acting never ends.
      summary_period: number of clock steps between two summaries.

    Raises:
      UsageError: `interaction_env_steps` is set, but the budget or the batches require further acting.
    """

    _is_of_others = False  # whether the loaded state was saved by a different number of learners

    def __init__(
        self,
        parts: Parts,
        clock: Clock,
        timer: Timer,
        signals: StopSignals,
        log: Callable[[str], Any],
        interaction_env_steps: int | None,
        summary_period: int,
    ):
        if interaction_env_steps is not None:
            _check_acting_may_end(parts, clock, interaction_env_steps)
        self._parts = parts
        self._clock = clock
        self._timer = timer
        self._signals = signals
        parts.unroller.log = parts.learner.log = self._log = log
        parts.unroller.check_signals = signals.check
        self._is_updating = False
        self._agreement = (SharedAgreement if replicas.is_joined() else Agreement)(clock, signals)
        self._device = parts.algorithm.progress.device
        self._progress = nest.host_view(parts.algorithm.progress)
        self._modes = parts.modes()
        self._observes = parts.observes
        self._interaction_env_steps = math.inf if interaction_env_steps is None else interaction_env_steps
        self._owed_steps = 0.0  # fraction of a vector step that is still due, if unroll_length is not whole
        self._summary_period = self._next_summary = summary_period
        self._owes_summary = False  # whether a summary was due in an iteration without updates
        self._collect_seconds = 0.0  # seconds of collecting in this process
        self._at_summary = self._totals()  # totals at the last summary, or at the start of this process

    @property
    def may_save(self) -> bool:
        """True if the state is complete and may be saved after an error."""
        return self._agreement.saves_after_errors and not self._is_updating and self._parts.unroller.may_save

    def iteration(self) -> Report:
        """Makes one iteration: collects rows, makes due updates, and advances the counters."""
        clock, timer = self._clock, self._timer
        self._parts.learner.restore_buffers()  # listeners may have assigned tensors to buffers
        if self._parts.learner.is_switching:
            self._parts.learner.switch(self._signals.breaking)
        began = timer.begin(COLLECT)
        self._agreement.begin(began)
        _tell_progress(self._parts.algorithm, self._progress, clock.progress)
        calibrates = self._parts.calibration.is_set and self._calibrates()
        experience = self._advance()
        if experience is not None and calibrates:
            self._parts.observe(experience)
        collected = timer.begin(UPDATE)
        is_due = clock.value >= self._next_summary
        learned = self._update(is_due, waits=calibrates and self._calibrates())
        timer.begin(LOOP)
        if experience is not None and self._observes:
            self._parts.after_iteration(experience)
            self._parts.learner.restore_buffers()
        self._is_updating = False
        clock.iterations += 1
        self._parts.unroller.publish()
        self._agreement.pause(timer.begin(LOOP))
        self._collect_seconds += collected - began
        report = self.report()
        if report.finished and clock.finished:
            _measure(self._parts.metrics, self._parts.unroller.late_records())
        report.scalars |= {f"train/{name}": value for name, value in learned.items()}
        report.is_summary = is_due or report.finished
        if report.is_summary:
            shown = self._summary()
            report.scalars |= shown
            report.previews = frozenset() if is_due or clock.finished else frozenset(shown)
        return report

    def report(self) -> Report:
        """Returns a report at the current clock, without scalars."""
        clock = self._clock
        return Report.of(clock, clock.finished or clock.paused or self._signals.number is not None)

    def iterate(self) -> Iterator[Report]:
        """Yields a report for each iteration; the last one has `finished` set."""
        finished = self._clock.finished
        while not finished:
            # No iteration follows a call of `stop`, so the last report has the final policy. If a run begins at or
            # after `stop_at`, listeners only do work that a signal had prevented.
            ends = self._clock.stop_reason is not None or self._clock.paused or self._signals.number is not None
            try:
                report = self._end() if ends else self.iteration()
            except RunEnded:
                self._parts.unroller.break_off()
                report = self.report()
            except Interrupted:
                report = self._broken_off("the signal broke off")
            except Exception as error:
                # A signal to all processes may end an environment's process before this process receives the signal.
                if self._signals.number is None or not self._signals.breakable:
                    raise
                report = self._broken_off(f"an error ({first_line(error)}) ended")
            # A signal during the work of listeners takes effect in the next report, so only one report has `finished`
            # set.
            finished = report.finished
            yield report

    def resume(self, directory: RunDirectory, load: Callable[[dict[str, Any]], None]) -> bool:
        """Continues from the newest checkpoint of a directory; returns False if the directory has no checkpoint.

        Args:
          directory: directory of the run.
          load: function that is called with the checkpoint's state.

        Raises:
          UsageError: the run cannot continue from any checkpoint.
        """
        batches, clock, checkpoints = self._parts.batches, self._clock, directory.checkpoints
        needs_rows = batches.stored() is not None
        if (found := directory.load_newest(load, needs_rows)) is None:
            return False
        if found != clock.value:
            raise UsageError(
                f"The checkpoint at {found} steps in {checkpoints.directory} was saved at {clock.value} and has been "
                "renamed; rename it back, or move it away"
            )
        if (reason := directory.stop_reason()) is not None:
            clock.stop(reason)
        if clock.finished:
            return True
        self._log(f"Resuming from {checkpoints.directory} at {found:,} steps")
        if needs_rows and found in directory.with_rows() and found < (newest := checkpoints.steps()[-1]):
            self._log(f"The checkpoint at {newest:,} steps is newer, but was saved without replay rows")
        if self._is_of_others:
            self._log("The loaded checkpoint was saved by another number of learners: new episodes begin")
            loss: str | None = "was saved by another number of learners"
        else:
            loss = directory.load_rows(found, batches.load_stored)
        if loss is not None and (num_steps := batches.resume_without_rows(clock.value)) is not None:
            # If acting has ended, it must begin again, because training needs rows.
            self._interaction_env_steps = max(self._interaction_env_steps, clock.env_steps + num_steps)
            _check_rows_can_come(clock, num_steps, f"the replay of {checkpoints.directory} {loss}")
            lacks_rows = needs_rows and found not in directory.with_rows()
            hint = "; checkpoints between two periods of CheckpointSaver have no rows" if lacks_rows else ""
            self._log(f"Replay {loss}: new rows are collected before training continues{hint}")
        return True

    def state_dict(self) -> dict[str, Any]:
        parts = self._parts
        return {
            "algorithm": parts.algorithm.state_dict(),
            "transforms": parts.transforms.state_dict(),
            "unroller": parts.unroller.state_dict(),
            "rng": rng_state(),
            "spaces": parts.spaces(),
            **parts.settings(),
            "learner": parts.learner.state_dict(),
            "batches": parts.batches.state_dict(),
            "metrics": parts.metrics.state_dict(),
            "calibration": parts.calibration.state_dict(),
            "counters": {
                **self._clock.state_dict(),
                "next_summary": self._next_summary,
                "owes_summary": self._owes_summary,
                "owed_steps": self._owed_steps,
                "num_learners": replicas.size(),
            },
            "num_threads": torch.get_num_threads(),
        }

    def load_state_dict(self, state: dict[str, Any], name: str | Path) -> None:
        """Continues from `state`.

        Args:
          state: state that `state_dict` returned.
          name: name of the run, for messages.
        """
        parts = self._parts
        parts.rebuild(state)
        load_networks(parts.algorithm, parts.transforms, state, name)
        parts.learner.load_state_dict(state["learner"])
        parts.batches.load_state_dict(state["batches"])
        counters, unroller = state["counters"], state["unroller"]
        _check_counts({**counters, "num_threads": state["num_threads"]})
        self._is_of_others = counters.get("num_learners", 1) != replicas.size()
        if not self._is_of_others:
            parts.metrics.load_state_dict(state["metrics"])
        elif unroller is not None:
            unroller = {name: unroller[name] for name in ("policy_version", "generation", "calls") if name in unroller}
        if unroller is not None:  # None if an older version saved the state after an error
            parts.unroller.load_state_dict(unroller)
        self._clock.load_state_dict(counters)
        self._clock.updates = parts.learner.updates
        self._next_summary, self._owed_steps = counters["next_summary"], counters["owed_steps"]
        self._owes_summary = counters.get("owes_summary", False)  # older versions did not save it
        parts.calibration.load_state_dict(state.get("calibration", {"is_set": False}))
        self._at_summary = self._totals()
        kernels.keep_num_threads(state["num_threads"])
        if not self._is_of_others or replicas.rank() == 0:
            set_rng_state(state["rng"])

    def _end(self) -> Report:
        """Returns the last report if the run was stopped after its last iteration."""
        self._agreement.end()
        return self.report()

    def _broken_off(self, what: str) -> Report:
        """Discards the rows of an interrupted unroll; returns the last report."""
        self._signals.breakable = False
        self._parts.unroller.break_off()
        self._log(f"{self._signals.name}: {what} the iteration; rows of this iteration are lost")
        return self.report()

    def _calibrates(self) -> bool:
        """Returns whether the run only collects rows for the statistics of transforms."""
        steps, parts = self._clock.env_steps, self._parts
        return parts.calibration.lasts(steps) and steps < self._interaction_env_steps and not parts.batches.rest()

    def _advance(self) -> Experience | None:
        """Collects an unroll if the run acts in this iteration, and advances the clock; returns the unroll or None."""
        batches, unroller, clock = self._parts.batches, self._parts.unroller, self._clock
        rest = batches.rest()
        owed_steps = self._owed_steps + (0 if rest else unroller.unroll_length)
        length = int(owed_steps)
        has_acted = clock.env_steps >= self._interaction_env_steps
        if not rest and not has_acted and (length or unroller.drains):
            experience, steps = self._collect(length)
        else:
            experience, steps = None, self._agreement.steps(0)
        clock.env_steps += steps
        if rest:
            clock.idle += rest
        elif has_acted:
            clock.idle += length * unroller.num_envs * replicas.size()
        self._owed_steps = owed_steps - length
        return experience

    def _collect(self, length: int) -> tuple[Experience, int]:
        """Collects an unroll and stores its rows; returns the unroll, and the number of steps of all learners."""
        batches, unroller = self._parts.batches, self._parts.unroller
        self._modes.switch(training=False)
        with self._agreement.collecting():
            self._signals.breakable = True
            experience = unroller.unroll(length, batches.acts_at_random(self._clock.env_steps))
            self._signals.breakable = False
        self._timer.begin(METRICS)
        steps = self._agreement.steps(unroller.num_steps)
        _measure(self._parts.metrics, unroller.records)
        self._timer.begin(STORE)
        batches.add(experience)
        return experience, steps

    def _update(self, summary_is_due: bool, waits: bool) -> dict[str, float]:
        """Makes due updates, or no update if `waits`; returns the updates' scalars if a summary is due."""
        batches, learner = self._parts.batches, self._parts.learner
        self._owes_summary = self._owes_summary or summary_is_due
        self._modes.switch(training=True)
        self._is_updating = True
        # `is_plain` may change during a run: after a failed compilation, updates run without compilation.
        chunks = () if waits else batches.chunks(self._clock.value, not learner.is_plain)
        learned = learner.train(self._timer.each(SAMPLE, chunks), self._owes_summary)
        self._clock.updates = learner.updates
        self._owes_summary = self._owes_summary and not learned
        return learned

    def _summary(self) -> dict[str, float]:
        """Returns the scalars of a summary, except the scalars of updates."""
        batches, learner, clock = self._parts.batches, self._parts.learner, self._clock
        self._next_summary = (clock.value // self._summary_period + 1) * self._summary_period
        self._parts.check_equal()
        last = learner.unreported() if clock.finished else {}  # a short run may not have had a summary
        scalars = {f"train/{name}": value for name, value in last.items()}
        if (held := batches.holdout()) is not None:
            scalars |= {f"holdout/{name}": value for name, value in learner.evaluate(held).items()}
        scalars |= {f"metrics/{name}": value for name, value in self._parts.metrics.results().items()}
        scalars |= {f"unroller/{name}": value for name, value in self._parts.unroller.stats().items()}
        now = self._totals()
        env_steps, iterations, wall, collecting = (new - old for new, old in zip(now, self._at_summary))
        self._at_summary = now
        scalars["time/unroll_ms"] = 1000 * collecting / iterations
        scalars["time/train_ms"] = 1000 * (wall - collecting) / iterations
        scalars["time/env_steps_per_second"] = env_steps / wall
        return scalars

    def _totals(self) -> tuple[float, ...]:
        """Returns the counters and seconds from which rates are computed."""
        return self._clock.env_steps, self._clock.iterations, self._clock.wall_seconds, self._collect_seconds


def _tell_progress(algorithm: RLAlgorithm, view: Any, progress: float) -> None:
    """Writes the progress of a run to the buffer `algorithm.progress`; `view` is the `nest.host_view` of the buffer.

    If the buffer is on a device, also keeps the number on the host.
    """
    view[...] = progress
    if isinstance(view, torch.Tensor):
        algorithm.tell_progress(progress)


def _measure(metrics: Metrics, records: StepRecords | StepSums | None) -> None:
    """Updates the metrics with the records of an unroll; None means that there are none."""
    if isinstance(records, StepSums):
        metrics.add(records)
    elif records is not None:
        metrics.update(*records)


def _check_counts(counts: dict[str, float]) -> None:
    """Raises ValueError if a saved count is out of range."""
    for name, count in counts.items():
        low, high = (1, MAX_THREADS) if name == "num_threads" else (0, sys.float_info.max)
        if not low <= count <= high:  # True for nan, too
            raise ValueError(f"{name} is {count}")


def _check_rows_can_come(clock: Clock, num_steps: int, loss: str) -> None:
    """Raises UsageError if the budget ends before the emptied replay has enough rows for an update."""
    name, budget, _ = clock.budget
    if name == "num_env_steps" and num_steps >= budget - clock.env_steps:
        raise UsageError(
            f"{loss}, and collecting the {num_steps:,} environment steps that training requires would spend the rest "
            f"of Trainer.num_env_steps = {budget:,}; raise it"
        )


def _check_acting_may_end(parts: Parts, clock: Clock, interaction_env_steps: int) -> None:
    if clock.budget.name == "num_env_steps":
        raise UsageError(
            "Trainer.interaction_env_steps ends acting, so a budget of num_env_steps would never be spent; give "
            "num_updates, num_iterations or wall_seconds"
        )
    if isinstance(parts, JointParts):
        raise UsageError(
            "Trainer.interaction_env_steps is for a single policy, because each policy trains by the number of its own "
            "steps; leave it out"
        )
    if not parts.batches.outlasts_acting:
        raise UsageError(
            f"Trainer.interaction_env_steps ends acting, and {type(parts.batches).__name__} with these settings keeps "
            "no rows to train on afterwards; leave interaction_env_steps out, or train off-policy from a replay that "
            "is not cleared"
        )
    if interaction_env_steps < (needed := parts.batches.needed_env_steps):
        raise UsageError(
            f"Trainer.interaction_env_steps is {interaction_env_steps}, but the first batch requires {needed} "
            "environment steps; raise it, or bind Trainer.batches = @OfflineBatches to train on recorded data only"
        )
