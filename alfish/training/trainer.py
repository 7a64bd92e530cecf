"""The trainer: composes environments, unroller, algorithm and learner, and counts.

The loop yields a `Report` an iteration and knows nobody who reads it; evaluation, checkpoints, summaries and the
progress bar are listeners.
"""

import contextlib
import json
import math
import random
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import gin
import numpy as np
import torch
from torch import nn

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.batches import Batches, EpochBatches, ReplayBatches
from alfish.data import IS_STEP
from alfish.environments import Environment, make_environment
from alfish.errors import RunError, UsageError, exited, first_line
from alfish.formatting import counted
from alfish.learner.learner import Learner
from alfish.metrics import DEFAULT_METRICS, Metric, Metrics
from alfish.offline.spaces import TrainedSpaces
from alfish.parameters import NonNegativeInt, PositiveFloat, PositiveInt, Range, checked
from alfish.parameters.description import CONFIG_FILE, as_gin
from alfish.parameters.kinds import shown
from alfish.parameters.parts import build
from alfish.runs import files
from alfish.runs.checkpoint import (
    RUN_FILE,
    BrokenCheckpoint,
    Checkpoints,
    Origin,
    check_like,
    new_run_id,
    run_id,
)
from alfish.runs.files import DiskError, write_atomically
from alfish.runs.provenance import append, provenance
from alfish.runs.random_state import rng_state, set_rng_state
from alfish.runs.run_log import RunLog
from alfish.runs.stop_signals import Interrupted, StopSignals
from alfish.specs import describe
from alfish.training.evaluator import MAX_EPISODE_LENGTH, Evaluator, make_evaluator
from alfish.training.listeners import CheckpointSaver, Listener, Report, default_listeners
from alfish.training.policy import Policy, load_networks, make_networks
from alfish.unrollers import SyncUnroller, Unroller

# What a run writes into its directory, beside the texts of its configuration.
FILES = ("metrics.csv", "log.txt", "provenance.json", RUN_FILE, "done")
DIRECTORIES = ("checkpoints", "replay", "eval", "tensorboard")
# With a budget of seconds, what pays in long runs alone starts from here.
LONG_RUN_SECONDS = 300
# torch ends the process where it is asked for very many.
MAX_THREADS = 1024
# Each budget, and the attribute that is counted against it.
BUDGETS = {
    "num_env_steps": "env_steps",
    "num_iterations": "iterations",
    "num_updates": "updates",
    "wall_seconds": "wall_seconds",
}


@gin.configurable(module="alfish")
@checked
class Trainer:
    """Trains an algorithm in environments until its budget is spent, or `stop` is called.

    Give exactly one budget; wall_seconds may stand beside another one as a time limit.

    Args:
      root_dir: the run's directory, made if needed; a run that is there is continued.
      algorithm: class or factory, takes (observation_spec, action_spec, reward_spec).
      environment: factory like `make_environment`, takes the keywords `seed`, `num_envs`, `evaluation`, `render_mode`.
      evaluation_environment: the same, to evaluate in; its spaces are `environment`'s. None: `environment`.
      batches: class or factory of the source of batches; None: `EpochBatches` on-policy, else `ReplayBatches`.
      unroller: class or factory, takes (environment, algorithm, transforms): `SyncUnroller`, `AsyncUnroller`.
      learner: class or factory, takes the algorithm.
      transforms: transform classes, the first one applied first.
      metrics: instances; None: those of `alfish.metrics.DEFAULT_METRICS`.
      listeners: instances; None: evaluation, checkpoints, summaries and progress.
      extra_metrics: instances beside those of `metrics`.
      extra_listeners: instances beside those of `listeners`, told after them.
      unroll_length: vector steps an iteration. Off-policy it may be a fraction: 0.25 is one step in four iterations.
        0: what an asynchronous unroller has ready.
      num_env_steps: budget in environment steps, all environments together.
      num_iterations: budget in iterations.
      num_updates: budget in gradient steps.
      wall_seconds: budget in seconds of training, over all resumes. Beside another budget, a time limit: the run ends
        when either is spent, and `progress`, which schedules follow, is that of the other budget.
      max_evaluation_length: actions after which episodes of evaluation, `alfish play` and `alfish record` are cut, and
        count as truncated.
      interaction_env_steps: off-policy, acting ends after so many environment steps, and training goes on with what
        replay holds, at the same pace, until the budget is spent; None: it never ends.
      seed: of everything random; environments get independent ones from it.
      device: 'cpu', 'cuda', 'cuda:1', or 'auto': cuda if there is one.
      num_threads: of torch. More than one is faster on an idle machine and much slower on a busy one.
      summary_period: steps between two summaries. Losses, times and rates are averages since the last one.

    Attributes:
      env_steps, iterations, updates, wall_seconds, progress: how far the run is.
      steps: the run's clock, by which periods are counted and files are named: environment steps, those that training
        has gone on for since acting ended, and updates that recorded data were trained on without acting.
      signals: SIGTERM and SIGINT while `train` runs. A listener that waits for others does so `with
        trainer.signals.breaking()`.
      config: texts to save with the run, by file name; the command line puts the gin configuration here.
      config_hash: of the configuration without its budget; None: not known. A checkpoint of another configuration is
        not continued from, unless `accepts_config_change`.
    """

    def __init__(
        self,
        root_dir: str | Path,
        *,
        algorithm: Callable[..., RLAlgorithm] = gin.REQUIRED,
        environment: Callable[..., Environment] = make_environment,
        evaluation_environment: Callable[..., Environment] | None = None,
        batches: Callable[[], Batches] | None = None,
        unroller: Callable[..., Unroller] = SyncUnroller,
        learner: Callable[[RLAlgorithm], Learner] = Learner,
        transforms: Sequence[Callable[..., Any]] = (),
        metrics: Sequence[Metric] | None = None,
        listeners: Sequence[Listener] | None = None,
        extra_metrics: Sequence[Metric] = (),
        extra_listeners: Sequence[Listener] = (),
        unroll_length: Annotated[float, Range(0, 10**7)] = 128,
        num_env_steps: PositiveInt | None = None,
        num_iterations: PositiveInt | None = None,
        num_updates: PositiveInt | None = None,
        wall_seconds: PositiveFloat | None = None,
        max_evaluation_length: PositiveInt = MAX_EPISODE_LENGTH,
        interaction_env_steps: NonNegativeInt | None = None,
        seed: Annotated[int, Range(0, 2**63 - 1)] = 0,
        device: str = "auto",
        num_threads: Annotated[int, Range(1, MAX_THREADS)] = 1,
        summary_period: PositiveInt = 1000,
    ):
        arguments = locals()  # before there are others
        self._arguments = {name: value for name, value in arguments.items() if name not in ("self", "root_dir")}
        given = dict(zip(BUDGETS, (num_env_steps, num_iterations, num_updates, wall_seconds)))
        self._budget_name, self._budget, self._wall_limit = _budget_of(given)
        if interaction_env_steps is not None and self._budget_name == "num_env_steps":
            raise UsageError(
                "Trainer.interaction_env_steps ends acting, so a budget of num_env_steps would never be spent; give "
                "num_updates, num_iterations or wall_seconds"
            )
        torch.set_num_threads(num_threads)
        self.root_dir = Path(root_dir)
        self.device = device_named(device)
        self.seed, self._summary_period = seed, summary_period
        self._max_evaluation_length = max_evaluation_length
        _seed_all(seed)
        self._make_environment, self._make_evaluation_environment = environment, evaluation_environment
        self.environment = build(environment, Environment, "Trainer.environment", seed=seed)
        specs = self.environment.observation_spec, self.environment.action_spec, self.environment.reward_spec
        self.algorithm, self.transforms = make_networks(algorithm, transforms, *specs, self.device)
        self.batches = self._make_batches(batches)
        if interaction_env_steps is not None and not self.batches.outlasts_acting:
            raise UsageError(
                f"Trainer.interaction_env_steps ends acting, and {type(self.batches).__name__} as it is set keeps no "
                "rows to train on after that; leave it out, or train off-policy from a replay that is not cleared"
            )
        parts = self.environment, self.algorithm, self.transforms
        self.unroller = build(unroller, Unroller, "Trainer.unroller", *parts)
        if not self.batches.acts:
            self._check_offline()
        self.unroller.bind(environment, unroll_length, seed)
        self._log = RunLog(self.root_dir / "log.txt")
        self.signals = StopSignals(self._rescue)
        self.unroller.log, self.unroller.check_signals = self.log, self.signals.check
        self._unroll_length = self.unroller.unroll_length
        if not self._unroll_length:
            raise UsageError("Trainer.unroll_length is 0; it must be positive, 0 is for AsyncUnroller")
        self.batches.bind(self.algorithm, self.transforms, self._unroll_length, self.unroller.num_columns)
        # Whether anyone but the batches reads rows.
        self._observes = type(self.algorithm).after_iteration is not RLAlgorithm.after_iteration or bool(
            self.transforms
        )
        self.learner = build(learner, Learner, "Trainer.learner", self.algorithm)
        self.learner.log = self.log
        self._progress = nest.host_view(self.algorithm.progress)
        self._modes = _Modes(self.algorithm)
        metrics = [metric() for metric in DEFAULT_METRICS] if metrics is None else metrics
        self.metrics = Metrics([*metrics, *extra_metrics], self.unroller.num_envs)
        self.unroller.shown = self.metrics.reads
        if not self.metrics.reads_infos:
            self.unroller.ignore_infos()
        self._plan()
        self.listeners = [*(default_listeners() if listeners is None else listeners), *extra_listeners]
        for listener in self.listeners:
            if not isinstance(listener, Listener):
                raise UsageError(f"Trainer.listeners has {shown(listener)}, which is no Listener; make its class one")
        origin = Origin(run_id(self.root_dir))
        self.checkpoints = Checkpoints(self.root_dir / "checkpoints", origin=origin)
        self.replay_checkpoints = Checkpoints(self.root_dir / "replay", keep_last=2, origin=origin)
        self.config: dict[str, str] = {}
        self._described: dict[str, str] | None = None
        self.config_hash: str | None = None
        self.accepts_config_change = False
        self.env_steps = self.iterations = 0
        self.wall_seconds = 0.0
        self._next_summary = summary_period
        self._owes_summary = False  # of updates
        self._unroll_seconds = 0.0  # of this process
        self._at_summary = self._times()  # the last one, or where this process began
        self._interaction_env_steps = interaction_env_steps
        self._idle_steps = 0  # of the clock, in iterations without acting
        self._owed_steps = 0.0  # vector steps, of unroll lengths that are no whole numbers
        self._started = False
        self._started_listeners: list[Listener] = []
        self._saved_iterations = 0  # of the newest checkpoint; 0 too where there is none
        self._unlock: Callable[[], Any] = lambda: None  # the run directory, which has one writer at a time
        self._updating = False
        self._stopped: str | None = None  # the reason

    # Where the run is.

    @property
    def steps(self) -> int:
        return self.env_steps + self._idle_steps

    @property
    def updates(self) -> int:
        return self.learner.updates

    @property
    def progress(self) -> float:
        return min(1.0, self._spent() / self._budget)

    @property
    def budget(self) -> tuple[str, float]:
        """Its name, one of `BUDGETS`, and its size."""
        return self._budget_name, self._budget

    @property
    def finished(self) -> bool:
        """Whether the run is at its end: a budget is spent, or `stop` was called."""
        return self._stopped is not None or self._spent() >= self._budget or self.wall_seconds >= self._wall_limit

    @property
    def stopped(self) -> str | None:
        """The reason that `stop` was given; None where it was not called."""
        return self._stopped

    @property
    def interrupted_by(self) -> int | None:
        """The signal that ended `train` before the run was finished."""
        return None if self.finished else self.signals.number

    @property
    def is_saved(self) -> bool:
        """Whether no iteration was made since the newest checkpoint, or since the beginning where there is none."""
        return self._saved_iterations == self.iterations

    # What it does.

    def start(self) -> None:
        """Continues the run in `root_dir` if there is one, and starts the listeners. `train` calls this."""
        if self._started:
            return
        self._started = True
        files.make_directory(self.root_dir)
        unlock = files.lock(self.root_dir, self)
        if unlock is None:
            raise UsageError(
                f"{self.root_dir} is being trained in already, by this program or another; choose another directory"
            )
        self._unlock = unlock
        files.check_places(self.root_dir, (*FILES, *self.config), DIRECTORIES)
        self._log.open()
        weakref.finalize(self, self._log.close)
        self._warn_of_settings()
        self.batches.start(self.environment)
        run = run_id(self.root_dir)
        self._set_origin(run)
        if self.checkpoints.steps():
            config = None if self.accepts_config_change else self.config_hash
            with_rows = [] if self.batches.stored() is None else self._steps_with_rows()
            step, _ = self.checkpoints.load("latest", self.load_state_dict, config, first=with_rows)
            if step != self.steps:
                raise UsageError(
                    f"The checkpoint at {step} steps in {self.root_dir / 'checkpoints'} was saved at {self.steps} and "
                    "has been renamed; rename it back, or move it away"
                )
            self._stopped = self._stopped or self._stopped_before()
            if self.finished:
                return
            self.log(f"Resuming from {self.root_dir / 'checkpoints'} at {step:,} steps")
            if step in with_rows and step < (newest := self.checkpoints.steps()[-1]):
                self.log(f"The checkpoint at {newest:,} steps is newer, but was saved without the rows of replay")
            self._set_origin(run or self.checkpoints.header(step).run)
            self._load_replay(step)
        if run is None:
            self._set_origin(self.checkpoints.origin.run or new_run_id())
            write_atomically(self.root_dir / RUN_FILE, f"{self.checkpoints.origin.run}\n")
        (self.root_dir / "done").unlink(missing_ok=True)
        for listener in self.listeners:
            listener.start(self)
            self._started_listeners.append(listener)
        self._announce()

    def stop(self, reason: str) -> None:
        """Finishes the run with the iteration under way, as if its budget was spent.

        For listeners, programs and other threads. Every listener receives one more report, which says `finished`: that
        of the iteration under way, or, after a call from a listener, one at the same steps. `train` then writes the
        reason to `done`. A later `train` in the same directory does nothing until `done` is removed. The first call
        counts.

        Args:
          reason: one line for people, such as 'solved'.

        Raises:
          UsageError: no reason is given.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(f"Trainer.stop takes a reason in words, such as 'solved', and was given {reason!r}")
        if self._stopped is None:
            self._stopped = reason.strip()

    def train(self) -> Report | None:
        """Runs until the run is finished, or SIGTERM or SIGINT asks to stop; a second SIGINT exits at once.

        After such a signal the iteration under way is finished, where that does not take long; see `stop_signals`. If
        an environment does not return, its rows are given up, and the listeners receive one more report, at the last
        iteration's steps.

        Returns:
          The last report; None if nothing was left to do, or if a signal came before the first iteration began.

        Raises:
          RunError: the run cannot go on, or something in it called sys.exit.
        """
        with self.signals:
            try:
                return self._train()
            finally:
                self.close()

    def _train(self) -> Report | None:
        report: Report | None = None
        try:
            with self.signals.breaking():
                self.start()
            if self.finished:
                self._mark_done()
                return None
            append(self.root_dir / "provenance.json", {"steps": self.steps, **provenance(self.device, self.seed)})
            for name, text in self._saved_config().items():
                write_atomically(self.root_dir / name, text)
            for report in self.iterate():
                for listener in self.listeners:
                    try:
                        listener.after_iteration(self, report)
                    except Interrupted:  # the next report says `finished`
                        self.log(f"{type(listener).__name__} was broken off by {self._signal_name()}")
            if self._stopped is not None:
                self.log(f"Stopped at {self.steps:,} steps: {self._stopped}")
            if self.finished:
                self._mark_done()
        except Interrupted:  # while it started: nothing has happened yet
            pass
        except (Exception, SystemExit) as error:
            self.signals.breakable = False
            ending = exited(error) if isinstance(error, SystemExit) else error
            is_sentence = isinstance(ending, (UsageError, RunError))
            self._log.copy(f"{ending}" if is_sentence else "".join(traceback.format_exception(ending)).rstrip())
            if report is not None:  # else nothing has happened yet, and the checkpoint that is there is better
                self._save_what_is_whole()
            if ending is not error:
                raise ending from error
            raise
        return report

    def close(self) -> None:
        """Frees environments and files, each whatever another raises; `train` does it itself."""
        with contextlib.ExitStack() as stack:  # the last one that is pushed comes first
            stack.callback(self._unlock)
            stack.callback(self._log.close)
            parts: list[Listener | Batches | Unroller] = [self.batches, self.unroller]
            for part in parts + self._started_listeners[::-1]:
                stack.callback(self._close, part)
            self._started_listeners = []

    def iterate(self) -> Iterator[Report]:
        """The loop: one unroll, the updates on it, and a report, until one says that it is the last."""
        finished = self.finished
        while not finished:
            # After `stop` nothing more is trained; the policy of the last report is the final one.
            ends = self._stopped is not None or self.signals.number is not None
            try:
                report = self._report() if ends else self._iteration()
            except Interrupted:
                report = self._broken_off("broke off")
            except Exception as error:
                # A signal to all processes may have ended those of environments before it was received here.
                if self.signals.number is None or not self.signals.breakable:
                    raise
                report = self._broken_off(f"an error ({first_line(error)}) ended")
            # What comes while listeners work is seen by the next report, so that one always says `finished`.
            finished = report.finished
            yield report

    def evaluator(
        self, num_episodes: int, num_envs: int = 8, max_length: int | None = None, **environment_arguments: Any
    ) -> Evaluator:
        """An evaluator of the policy in training, with environments of its own.

        Args:
          num_episodes: whole episodes that it will be asked for, at most.
          num_envs: environments at a time.
          max_length: actions after which an episode is cut; None: the trainer's max_evaluation_length.
          environment_arguments: for the environment's factory, such as render_mode.
        """
        factory, parts = self._make_evaluation_environment or self._make_environment, (self.algorithm, self.transforms)
        limit = self._max_evaluation_length if max_length is None else max_length
        evaluator = make_evaluator(factory, *parts, num_episodes, num_envs, limit, **environment_arguments)
        if self._started:  # else the run is somebody else's to write in
            evaluator.log = self.log
        for name in ("observation_spec", "action_spec", "reward_spec") if self._make_evaluation_environment else ():
            evaluated, trained = getattr(evaluator.environment, name), getattr(self.environment, name)
            if evaluated != trained:
                evaluator.close()
                raise UsageError(
                    f"Trainer.evaluation_environment: its {name} is {describe(evaluated)}, and the policy trains on "
                    f"{describe(trained)}; make them equal"
                )
        return evaluator

    def new_environment(self) -> Environment:
        """Another one like those that it trains in."""
        return self._make_environment(seed=self.seed)

    def policy(self) -> Policy:
        """The policy in training, to act with."""
        spaces = self.environment.observation_space, self.environment.action_space
        return Policy(self.algorithm, self.transforms, *spaces, self.env_steps)

    def load_policy(self, checkpoint: str | int = "latest") -> int:
        """Puts a checkpoint's weights and transforms in place, nothing else; returns its env steps."""

        def load(state: dict[str, Any]) -> None:
            load_networks(self.algorithm, self.transforms, state, self.root_dir)
            self.env_steps = state["counters"]["env_steps"]

        self.checkpoints.load(checkpoint, load)
        return self.env_steps

    def save(self, best: bool = False, rows: bool = True) -> Path:
        """Writes a checkpoint of everything that `load_state_dict` continues from.

        Args:
          best: whether it is of the best policy so far.
          rows: whether to write the rows of replay too, which may take long. A run is continued from the newest
            checkpoint that has its rows, if there is one.
        """
        stored = self.batches.stored() if rows else None
        if stored is not None:
            # First, and those of the newest checkpoint that has any are kept: it never stands without its rows.
            self.replay_checkpoints.save(self.steps, stored, keep=self._steps_with_rows()[-1:])
        path = self.checkpoints.save(self.steps, self.state_dict(), best, keep=self._steps_with_rows())
        if rows:
            self._saved_iterations = self.iterations
        return path

    def state_dict(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm.state_dict(),
            "transforms": self.transforms.state_dict(),
            "unroller": self.unroller.state_dict(),
            "rng": rng_state(),
            "spaces": TrainedSpaces(
                self.environment.observation_space, self.environment.action_space, self.environment.reward_spec
            ).to_json(),
            **self._plain_state(),
        }

    def _plain_state(self) -> dict[str, Any]:
        """The part of the state whose kinds are the same in every checkpoint."""
        return {
            "learner": self.learner.state_dict(),
            "batches": self.batches.state_dict(),
            "metrics": self.metrics.state_dict(),
            "listeners": {name: listener.state_dict() for name, listener in self._named_listeners()},
            "counters": {
                "env_steps": self.env_steps,
                "iterations": self.iterations,
                "wall_seconds": self.wall_seconds,
                "next_summary": self._next_summary,
                "owes_summary": self._owes_summary,
                "owed_steps": self._owed_steps,
                "idle_steps": self._idle_steps,
            },
            "num_threads": torch.get_num_threads(),
            "config": self._saved_config(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`.

        Raises:
          UsageError: it does not fit this trainer.
          Exception: it is not what `state_dict` returns; this trainer is of no use then.
        """
        check_like(state, self._plain_state())
        load_networks(self.algorithm, self.transforms, state, self.root_dir)
        self.learner.load_state_dict(state["learner"])
        if state["unroller"] is not None:  # as older versions left it after an error
            self.unroller.load_state_dict(state["unroller"])
        self.batches.load_state_dict(state["batches"])
        self.metrics.load_state_dict(state["metrics"])
        for name, listener in self._named_listeners():  # one that was not there before starts afresh
            if saved := state["listeners"].get(name):
                listener.load_state_dict(saved)
        counters = state["counters"]
        self.env_steps = counters["env_steps"]
        self.iterations = self._saved_iterations = counters["iterations"]
        self.wall_seconds, self._next_summary = counters["wall_seconds"], counters["next_summary"]
        self._owes_summary = counters.get("owes_summary", False)  # older versions had none
        self._owed_steps, self._idle_steps = counters["owed_steps"], counters["idle_steps"]
        self._at_summary = self._times()
        torch.set_num_threads(state["num_threads"])  # sums differ in their last bits between thread counts
        set_rng_state(state["rng"])

    def log(self, text: str) -> None:
        """Prints a line without breaking the progress bar, and keeps it in `log.txt`, once there is a run."""
        try:
            self._log.write(text)
        except DiskError as error:  # no reason not to say it
            text = f"{text} [{error}]"
        for listener in self.listeners:
            if hasattr(listener, "line"):
                listener.line(text)
                return
        print(text, file=sys.stderr, flush=True)

    # The loop's parts.

    def _iteration(self) -> Report:
        began = time.perf_counter()
        algorithm = self.algorithm
        self._progress[...] = self.progress
        steps, experience = 0, None
        rest = self.batches.rest()
        owed_steps = self._owed_steps + (0 if rest else self._unroll_length)
        length = int(owed_steps)
        if rest:
            self._idle_steps += rest
        elif self._interaction_env_steps is not None and self.env_steps >= self._interaction_env_steps:
            self._idle_steps += length * self.unroller.num_envs
        elif length or self.unroller.drains:
            self._modes.switch(training=False)
            self.signals.breakable = True
            experience = self.unroller.unroll(length, self.batches.acts_at_random(self.env_steps))
            self.signals.breakable = False
            records = self.unroller.records
            assert records is not None
            seen, taken = records.observation, records.action
            self.metrics.update(records.step_type, records.reward, records.infos, observation=seen, action=taken)
            steps = int(np.count_nonzero(IS_STEP.take(records.step_type)))
            self.env_steps += steps
            self.batches.add(experience)
        self._owed_steps = owed_steps - length
        unrolled = time.perf_counter()
        due = self.steps >= self._next_summary
        self._owes_summary = self._owes_summary or due
        self._modes.switch(training=True)
        self._updating = True
        self.batches.for_graph = not self.learner.is_plain  # plain, too, once it has fallen back
        learned = self.learner.train(self.batches.chunks(self.steps), self._owes_summary)
        if learned:
            self._owes_summary = False
        if experience is not None and self._observes:
            experience = nest.tensors(experience, self.device)
            with torch.no_grad():
                algorithm.after_iteration(experience)
            # On-policy, row 0 was the extra row of the unroll before; statistics count it once.
            num_seen = 1 if algorithm.on_policy else 0
            self.transforms.observe(experience.time_step, experience.transform_state, num_seen)
        self._updating = False
        self.iterations += 1
        self.unroller.publish()
        ended = time.perf_counter()
        self.wall_seconds += ended - began
        self._unroll_seconds += unrolled - began
        report = self._report()
        # Where no update was made when a summary was due, those of the next ones follow.
        report.scalars = {f"train/{name}": value for name, value in learned.items()}
        if due or report.finished:
            self._next_summary = (self.steps // self._summary_period + 1) * self._summary_period
            if (held := self.batches.holdout()) is not None:
                report.scalars |= {f"holdout/{name}": value for name, value in self.learner.evaluate(held).items()}
            report.scalars |= {f"metrics/{name}": value for name, value in self.metrics.results().items()}
            report.scalars |= {f"unroller/{name}": value for name, value in self.unroller.stats().items()}
            now = self._times()
            env_steps, iterations, wall, unrolling = (new - old for new, old in zip(now, self._at_summary))
            self._at_summary = now
            report.scalars["time/unroll_ms"] = 1000 * unrolling / iterations
            report.scalars["time/train_ms"] = 1000 * (wall - unrolling) / iterations
            report.scalars["time/env_steps_per_second"] = env_steps / wall
        return report

    def _announce(self) -> None:
        """Says what is trained, once nothing has been refused."""
        trained = sum(parameter.numel() for parameter in self.algorithm.parameters() if parameter.requires_grad)
        acting = f"{counted(self.unroller.num_envs, 'environment')}, " if self.batches.acts else ""
        self.log(
            f"{type(self.algorithm).__name__} on {self.environment.name}: {acting}{trained:,} parameters on "
            f"{self.device}, Trainer.{self._budget_name} = {self._budget:,}"
        )
        if self.environment.lacks_limit:
            self.log(
                f"{self.environment.name} has no time limit, so an episode may never end, and evaluation cuts it at "
                f"{self._max_evaluation_length:,} steps (Trainer.max_evaluation_length); "
                "make_environment.env_kwargs = {'max_episode_steps': 1000} sets a limit"
            )

    def _times(self) -> tuple[float, ...]:
        """What rates are measured of: counters and seconds."""
        return self.env_steps, self.iterations, self.wall_seconds, self._unroll_seconds

    def _warn_of_settings(self) -> None:
        """Says what a run will do that hardly anybody wants."""
        warmup = self.batches.warmup_env_steps
        if self._budget_name == "num_env_steps" and self._budget <= warmup and not self.batches.rest():
            self.log(
                f"Nothing will be trained: Trainer.num_env_steps is {self._budget:,}, and acting before training takes "
                f"{warmup:,} (warmup_env_steps)"
            )
        if self.config and not any(isinstance(listener, CheckpointSaver) for listener in self.listeners):
            self.log(
                "Nothing of this run will be saved: Trainer.listeners has no @CheckpointSaver(), which the default has"
            )

    def _saved_config(self) -> dict[str, str]:
        """`config`, or for a trainer that was built in Python, the configuration that builds it again."""
        if not self.config and self._described is None:
            self._described = {CONFIG_FILE: as_gin(self._arguments)}
        return self.config or self._described or {}

    def _plan(self) -> None:
        """Tells the learner how long the run is to be, for what pays in long runs alone."""
        updates = self.batches.updates_per_iteration
        iterations = {
            "num_env_steps": self._budget / (self._unroll_length * self.unroller.num_columns),
            "num_iterations": self._budget,
            "num_updates": self._budget / updates,
            "wall_seconds": math.inf if self._budget >= LONG_RUN_SECONDS else 0.0,
        }[self._budget_name]
        self.learner.plan(iterations * updates, self.batches.rows_per_update)

    def _make_batches(self, batches: Callable[[], Batches] | None) -> Batches:
        name, on_policy = type(self.algorithm).__name__, self.algorithm.on_policy
        if batches is None:
            batches = EpochBatches if on_policy else ReplayBatches
        made = build(batches, Batches, "Trainer.batches")
        if made.on_policy != on_policy:
            kind, fitting = ("on-policy", "EpochBatches") if on_policy else ("off-policy", "ReplayBatches")
            raise UsageError(
                f"{name} is {kind}, and Trainer.batches is {type(made).__name__}; bind Trainer.batches = @{fitting}"
            )
        return made

    def _check_offline(self) -> None:
        name = type(self.batches).__name__
        if self._budget_name == "num_env_steps":
            raise UsageError(
                f"Trainer.num_env_steps is a budget of environment steps, and {name} takes none; bind "
                "Trainer.num_env_steps = None, and Trainer.num_updates in its place"
            )
        if not isinstance(self.unroller, SyncUnroller):
            raise UsageError(f"Trainer.unroller has nothing to collect, since {name} never acts; leave it out")

    def _steps_with_rows(self) -> list[int]:
        """Of the checkpoints whose rows of replay were saved, ascending."""
        rows = self.replay_checkpoints.steps()
        return [step for step in self.checkpoints.steps() if step in rows]

    def _set_origin(self, run: str | None) -> None:
        self.checkpoints.origin = self.replay_checkpoints.origin = Origin(run, self.config_hash)

    def _load_replay(self, step: int) -> None:
        """The rows that belong to the checkpoint; where they are not there, the run goes on without them."""
        loss = "was not saved"
        if step in self.replay_checkpoints.steps():
            try:
                self.replay_checkpoints.load(step, self.batches.load_stored, mmap=True)
                return
            except BrokenCheckpoint as error:
                loss = f"is lost ({error})"
        if isinstance(self.batches, ReplayBatches):
            num_steps = self.batches.resume_without_rows(self.steps)
            if self._interaction_env_steps is not None:  # acting may have ended, and without rows nothing trains
                self._interaction_env_steps = max(self._interaction_env_steps, self.env_steps + num_steps)
            self.log(f"Its replay {loss}: acting before training on")

    def _named_listeners(self) -> Iterator[tuple[str, Listener]]:
        """By class, the second of a class as `Evaluate 2`."""
        counts: dict[str, int] = {}
        for listener in self.listeners:
            name = type(listener).__name__
            counts[name] = counts.get(name, 0) + 1
            yield (name if counts[name] == 1 else f"{name} {counts[name]}"), listener

    def _report(self) -> Report:
        finished = self.finished or self.signals.number is not None
        counters = self.steps, self.env_steps, self.iterations, self.updates, self.wall_seconds
        return Report(*counters, self.progress, finished)

    def _spent(self) -> float:
        return getattr(self, BUDGETS[self._budget_name])

    def _mark_done(self) -> None:
        content: dict[str, Any] = {
            "env_steps": self.env_steps,
            "iterations": self.iterations,
            "updates": self.updates,
        }
        if self._stopped is not None:
            content["reason"] = self._stopped
        write_atomically(self.root_dir / "done", json.dumps(content) + "\n")

    def _stopped_before(self) -> str | None:
        """The reason in the `done` of an earlier `train`; None where there is no such file, or a budget was spent."""
        try:
            content = json.loads((self.root_dir / "done").read_text())
        except (FileNotFoundError, ValueError):  # what is no JSON was not written here
            return None
        return content.get("reason") if isinstance(content, dict) else None

    def _broken_off(self, what: str) -> Report:
        """The report of an iteration whose unroll did not come to an end after a signal."""
        self.signals.breakable = False
        self.unroller.break_off()
        self.log(f"{self._signal_name()}: {what} the collection of rows; those of the unfinished iteration are lost")
        return self._report()

    def _signal_name(self) -> str:
        assert self.signals.number is not None
        return signal.Signals(self.signals.number).name

    def _rescue(self) -> None:
        """Saves the last iteration; see `StopSignals`."""
        self.log(f"{self._signal_name()}: a call that holds the main thread does not return; the process is ended")
        if not self.is_saved:
            self.unroller.break_off()
            self.save()
            self.log(f"Saved a checkpoint at {self.steps:,} steps")

    def _close(self, part: Listener | Batches | Unroller) -> None:
        try:
            with self.signals.breaking():
                part.close()
        except Interrupted:
            self.log(f"{type(part).__name__} did not close in time after {self._signal_name()}")

    def _save_what_is_whole(self) -> None:
        """After an error in an environment: keeps the weights of the last iteration; the rows under way are lost."""
        if not self._updating:
            self.unroller.break_off()
            try:
                self.save()
            except DiskError as error:  # that which is being raised is to be seen
                self.log(f"No checkpoint was saved at {self.steps:,} steps: {error}")
            else:
                self.log(f"Saved a checkpoint at {self.steps:,} steps after an error")


class _Modes:
    """Switches an algorithm between acting and training, in less than the 0.1 ms that `nn.Module.train` takes."""

    def __init__(self, algorithm: RLAlgorithm):
        self._algorithm = algorithm
        modules = list(algorithm.modules())
        self._is_plain = all(type(module).train is nn.Module.train for module in modules)
        self._attributes = [module.__dict__ for module in modules]

    def switch(self, training: bool) -> None:
        if not self._is_plain:
            self._algorithm.train(training)
            return
        for attributes in self._attributes:
            attributes["training"] = training


def _budget_of(given: dict[str, float | None]) -> tuple[str, float, float]:
    """Name and size of the budget, and the limit of seconds beside it."""
    chosen = {name: value for name, value in given.items() if value is not None}
    said = " and ".join(f"Trainer.{name} = {value}" for name, value in chosen.items()) or "none"
    wall_limit = chosen.pop("wall_seconds", math.inf)
    if not chosen and wall_limit < math.inf:
        return "wall_seconds", wall_limit, wall_limit
    if len(chosen) != 1:
        raise UsageError(
            f"Trainer takes exactly one budget of {', '.join(BUDGETS)}, beside which wall_seconds may stand; "
            f"given: {said}"
        )
    return *next(iter(chosen.items())), wall_limit


def device_named(name: str) -> torch.device:
    """The device of `Trainer.device`.

    Raises:
      UsageError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"Trainer.device is {name!r}; it is auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"Trainer.device is {name!r}, which alfish does not use; it is auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("Trainer.device is 'cuda', but torch finds no GPU here; use --device=cpu")
    return device


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
