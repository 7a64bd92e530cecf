"""The trainer composes the parts of a run, and reports iterations to listeners."""

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import gin
from absl import logging

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler import kernels
from alfish.environments import Environment, make_environment
from alfish.errors import UsageError, counted
from alfish.errors.user_code import brief, calling, in_words, refuse_default_dtype
from alfish.learner.batches import Batches
from alfish.learner.learner import Learner
from alfish.metrics import Metric
from alfish.metrics.env_info import SUCCESS
from alfish.networks.buffers import UnsavedAttributes
from alfish.offline.recorded_spaces import changed_actions
from alfish.parameters import NonNegativeInt, PositiveFloat, PositiveInt, Range, UnitInterval, checked, exclusive
from alfish.policies.networks import chosen_policy, load_networks
from alfish.processes import replicas
from alfish.runs.checkpoint_file import check_loadable
from alfish.runs.files import DiskError, absolute
from alfish.runs.loading import check_like
from alfish.runs.provenance import provenance
from alfish.runs.stop_signals import Interrupted, StopSignals
from alfish.runs.timer import LOOP, Timer
from alfish.training import untrained
from alfish.training.clock import Clock
from alfish.training.evaluator import MAX_EPISODE_LENGTH, Evaluator, print_to_stderr
from alfish.training.leagues import check_snapshots
from alfish.training.listener import LISTENERS, Listener, Notifier, PolicyRun, Report
from alfish.training.listeners import CheckpointSaver, checked_listeners
from alfish.training.loop import Loop
from alfish.training.measured_schedules import measuring
from alfish.training.policy import Policy
from alfish.training.run_parts import (
    MAX_THREADS,
    Environments,
    JointParts,
    RunSettings,
    make_parts,
    start_external,
    use_device,
)
from alfish.training.shared_directory import own_directory
from alfish.unrollers import SyncUnroller, Unroller

# Entries of a trainer's state whose types are the same in every checkpoint.
PLAIN_STATE = ("learner", "batches", "metrics", "listeners", "counters", "num_threads", "config")


@gin.configurable(module="alfish")
@checked
class Trainer:
    """Trains an algorithm in environments until its budget is spent, or `stop` is called.

    Give exactly one budget; wall_seconds may be given in addition to another budget, as a time limit.

    Args:
      root_dir: directory of the run, created if needed; an existing run is continued.
      algorithm: class or factory of the algorithm; called with (observation_spec, action_spec, reward_spec).
      environment: factory like `make_environment`, called with the keywords `seed`, `num_envs`, `evaluation`,
        `render_mode`; or an id or a name for `make_environment`.
      evaluation_environment: the same for evaluation, with the same spaces. Observations may lack leaves that do not
        affect the action. None means `environment`.
      batches: class or factory of the source of batches; None means `EpochBatches` on-policy, else `ReplayBatches`.
      unroller: class or factory of the unroller, such as `SyncUnroller` or `AsyncUnroller`; called with (environment,
        algorithm, transforms).
      learner: class or factory of the learner; called with the algorithm.
      transforms: classes or factories of transforms, in the order in which they are applied.
      calibration: fraction of the budget, in [0, 1], in which transforms observe rows and nothing is trained; at most
        10,000 environment steps. If the steps of the run are unknown (`wall_seconds`), any fraction above 0 means 1000
        steps. The last unroll of the calibration is the first that trains; statistics then stay fixed. 0 means one
        unroll. None means that transforms observe every unroll.
      initial_parts: parts of other runs from which a new run starts, by the prefix of the part's names in the new run:
        `{'actor_encoder': 'runs/x', 'critic.encoder': 'actor_encoder@runs/x:best'}`; see `InitialParts`.
      policies: policies that train together in games (`make_games`): a dict from the name of a policy to patterns of
        the agents that it may play; see docs/several_policies.md. 'each' means one policy for each agent; None means
        one policy for all.
      metrics: instances of metrics; None means `alfish.metrics.DEFAULT_METRICS`.
      listeners: instances of listeners; None means evaluation, checkpoints, summaries and progress.
      extra_metrics: instances of metrics in addition to `metrics`.
      extra_listeners: instances of listeners in addition to `listeners`. Listeners that change the algorithm are called
        first, then evaluations, other listeners, and savers of checkpoints. Extra listeners come last of their kind.
      unroll_length: number of vector steps in an iteration. Off-policy, it may be a fraction: 0.25 means one step in
        four iterations. 0 means all rows that an asynchronous unroller has ready.
      num_env_steps: budget in environment steps of all environments together; the iteration that reaches it is
        completed. The first rows of episodes are not steps, so an iteration has fewer steps than rows.
      num_iterations: budget in iterations.
      num_updates: budget in gradient steps.
      wall_seconds: budget in seconds of training, over all resumes. In addition to another budget, it is a time limit:
        the run ends when either is spent. Progress, which schedules read, is then the spent fraction of the other
        budget.
      max_evaluation_length: number of actions after which an episode is truncated in an evaluation, `alfish play` or
        `alfish record`.
      evaluation_infos: globs of the numbers that evaluations read from the infos at the ends of episodes, besides the
        returns: ['success', 'episode.*'] also reads nested entries. Their means are the scalars
        `evaluation/env_info/NAME`.
      stop_at: clock steps at which this process saves a checkpoint and ends. The run is then unfinished, and its
        schedules still follow the budget. To continue, run it again with a later stop_at. None means no pause.
      interaction_env_steps: number of environment steps after which acting ends, off-policy only. Training continues on
        the rows in replay, at the same rate, until the budget is spent. None means that acting never ends.
      seed: seed of all random generators; environments get independent seeds derived from it.
      device: device of the algorithm: 'cpu', 'cuda', 'cuda:1' or 'auto'; 'auto' means CUDA if available.
      num_threads: number of torch's threads. More than one thread is faster on an idle machine, and much slower on a
        busy machine. 'auto' means one thread; large matrix products of compiled updates then also use idle cores, with
        the same results.
      summary_period: number of clock steps between summaries; losses, times and rates are averages over this period.

    Attributes:
      environment, algorithm, transforms, batches, unroller, learner, metrics, listeners: parts that were built.
      clock: counters, budget and progress of the run.
      directory: files of the run.
      signals, device, seed: signals that end the run (`StopSignals`), device of the algorithm, and seed of the run.
    """

    _saved_iterations = 0  # iterations of the newest checkpoint that was saved with `rows`

    def __init__(
        self,
        root_dir: str | Path,
        *,
        algorithm: Callable[..., RLAlgorithm] = gin.REQUIRED,
        environment: str | Callable[..., Environment] = make_environment,
        evaluation_environment: str | Callable[..., Environment] | None = None,
        batches: Callable[[], Batches] | None = None,
        unroller: Callable[..., Unroller] = SyncUnroller,
        learner: Callable[[RLAlgorithm], Learner] = Learner,
        transforms: Sequence[Callable[..., Any]] = (),
        calibration: UnitInterval | None = None,
        initial_parts: Mapping[str, str] | None = None,
        policies: Mapping[str, Any] | Literal["each"] | None = None,
        metrics: Sequence[Metric] | None = None,
        listeners: Sequence[Listener] | None = None,
        extra_metrics: Sequence[Metric] = (),
        extra_listeners: Sequence[Listener] = (),
        unroll_length: Annotated[float, Range(0, 10**7)] = 128,
        num_env_steps: PositiveInt | None = None,
        num_iterations: PositiveInt | None = None,
        num_updates: PositiveInt | None = None,
        wall_seconds: PositiveFloat | None = None,
        stop_at: PositiveInt | None = None,
        max_evaluation_length: PositiveInt = MAX_EPISODE_LENGTH,
        evaluation_infos: Sequence[str] = SUCCESS,
        interaction_env_steps: NonNegativeInt | None = None,
        seed: Annotated[int, Range(0, 2**63 - 1)] = 0,
        device: str = "auto",
        num_threads: Annotated[int, Range(1, MAX_THREADS)] | Literal["auto"] = "auto",
        summary_period: PositiveInt = 1000,
    ):
        arguments = {name: value for name, value in locals().items() if name not in ("self", "root_dir")}
        self.clock = Clock.of(arguments)
        self.timer = Timer()
        self.signals = StopSignals(self._rescue)
        self.device, self.seed, root_dir = use_device(device, num_threads), seed, absolute(root_dir)
        factories = environment, evaluation_environment
        self._environments = Environments(*factories, seed, self.device, max_evaluation_length, evaluation_infos)
        settings = RunSettings(
            budget=self.clock.budget,
            device=self.device,
            algorithm=algorithm,
            transforms=transforms,
            calibration=calibration,
            batches=batches,
            unroller=unroller,
            learner=learner,
            metrics=metrics,
            extra_metrics=extra_metrics,
            unroll_length=unroll_length,
            initial_parts=initial_parts,
        )
        parts = self._parts = make_parts(self._environments, policies, settings)
        self.environment = parts.environment
        self.algorithm = parts.algorithm
        self.transforms = parts.transforms
        self.batches = parts.batches
        self.unroller = parts.unroller
        self.learner = parts.learner
        self.metrics = parts.metrics
        self.listeners = checked_listeners(listeners, extra_listeners, measuring(parts))
        _note_use([*(metrics or ()), *extra_metrics, *self.listeners], root_dir)
        self._notifier, self.directory = Notifier(self.listeners), own_directory(root_dir, arguments)
        self._loop = Loop(parts, self.clock, self.timer, self.signals, self.log, interaction_env_steps, summary_period)

    @property
    def interrupted_by(self) -> int | None:
        """Number of the signal that ended `train` before the run was finished; None if no signal did."""
        return None if _is_done(self, self._notifier) else self.signals.number

    @property
    def is_saved(self) -> bool:
        """True if no iteration has followed the newest checkpoint saved with `rows`, or the start if there is none."""
        return self._saved_iterations == self.clock.iterations

    def start(self) -> None:
        """Continues an existing run in `root_dir`, and starts the listeners; `train` calls this method.

        Raises:
          UsageError: the run is already being trained, cannot be continued, or ends before its first update.
        """
        if self.directory.is_open:
            return
        self.unroller.check_learners()
        self.directory.open()
        _warn_of_settings(self)
        self.batches.start(self.environment)
        start_external(self._parts)
        if not self._loop.resume(self.directory, self.load_state_dict):
            self._parts.initial_parts.load(self.log)
        if self.clock.finished and not any(behind for (behind,) in replicas.gather(self._notifier.is_behind(self))):
            return
        untrained.check_budget(self)
        self.directory.begin()
        self._notifier.start(self)
        _announce(self)

    def stop(self, reason: str) -> None:
        """Finishes the run after the current iteration, as if the budget were spent. Only the first call counts.

        Any listener, program or thread may call this method. Listeners then receive one more report, with `finished`
        set. `train` writes the reason to `done`; a later `train` does nothing until the file is removed.

        Args:
          reason: reason in words, such as 'solved'.

        Raises:
          UsageError: the reason is empty.
        """
        self.clock.stop(reason)

    @brief
    def train(self) -> Report | None:
        """Trains until the run is finished, or until a signal is received (SIGTERM, SIGUSR1, SIGINT).

        After a signal, the current iteration is completed if that does not take long. If an environment does not
        return, the iteration's rows are discarded, and listeners receive one more report at the clock of the last
        iteration. A second SIGINT exits at once.

        Returns:
          The last report; None if the run was already finished, or if a signal came before the first iteration.

        Raises:
          RunError: the run cannot continue, code of the run called sys.exit, or the run ended without an update or with
            parameters that are not finite.
        """
        with exclusive.held(), self.signals:
            try:
                report = self._train()
            finally:
                self.close()
        if _is_done(self, self._notifier):
            untrained.check_trained(self)
        return report

    def _train(self) -> Report | None:
        report: Report | None = None
        try:
            with self.signals.breaking():
                self.start()
            if _is_done(self, self._notifier):
                self.directory.mark_done(self.clock)
                return None
            origins = {"steps": self.clock.value, **provenance(self.device, self.seed, kernels.num_threads())}
            self.directory.write_config({**origins, **self._parts.initial_parts.provenance()})
            for report in itertools.chain(self._notifier.missed_report(self), _checked(self)):
                self.timer.begin(LISTENERS)
                self._notifier.after_iteration(self, report)
                self.timer.begin(LOOP)
            if self.clock.stop_reason is not None:
                self.log(f"Stopped at {self.clock.value:,} steps: {self.clock.stop_reason}")
            if self.clock.paused and self.interrupted_by is None:
                self.log(f"Paused at {self.clock.value:,} steps (Trainer.stop_at = {self.clock.stop_at:,})")
            if _is_done(self, self._notifier):
                untrained.finish(self)
        except Interrupted:  # during `start`, there is nothing to save
            pass
        except (Exception, SystemExit) as error:
            self.signals.breakable = False
            ending = in_words(error) if isinstance(error, SystemExit) else error
            self.directory.log_error(ending, not self.clock.iterations)
            if report is not None:  # without an iteration, there is nothing to save
                self._save_what_is_whole()
            if ending is not error:
                raise ending from error
            raise
        return report

    def close(self) -> None:
        """Closes listeners, environments and files, even if closing one of them raises; `train` calls this method."""
        with contextlib.ExitStack() as stack:  # runs in reverse order
            stack.callback(self.directory.close)
            stack.callback(self.learner.close)
            parts: list[Listener | Batches | Unroller] = [self.batches, self.unroller]
            for part in parts + self._notifier.take_started()[::-1]:
                stack.callback(_close, part, self)

    def iterate(self) -> Iterator[Report]:
        """Yields the report of each iteration; the last report has `finished` set."""
        return self._loop.iterate()

    def evaluator(
        self, num_episodes: int, num_envs: int = 8, max_length: int | None = None, **options: Any
    ) -> Evaluator:
        """Returns an evaluator of the policy in training, with separate environments.

        Args:
          num_episodes: largest number of episodes of one evaluation.
          num_envs: number of environments at a time.
          max_length: number of actions after which an episode is truncated; None means `max_evaluation_length`.
          options: `environment`, a factory or an id in place of `evaluation_environment`; `lineup`, see `Evaluate`; and
            options of the environment's factory, such as render_mode.
        """
        evaluator = self._environments.evaluator(self._parts, num_episodes, num_envs, max_length, **options)
        if self.directory.is_open:  # otherwise this process may not write to the log
            evaluator.log = self.log
        return evaluator

    def new_environment(self) -> Environment:
        """Returns a new environment like the training environment."""
        return self._environments.new()

    def by_policy(self) -> dict[str, Any]:
        """Returns this run for each policy, see `Run.by_policy`."""
        if isinstance(self._parts, JointParts):
            return {member.name: PolicyRun(self, member) for member in self._parts.members}
        return {"": self}

    def policy(self, name: str | None = None) -> Policy:
        """Returns the policy in training, which shares the trainer's parameters.

        Args:
          name: name of the policy in a run of several policies; None means the only policy.

        Raises:
          UsageError: there is no such policy, or `name` is None and there are several policies.
        """
        networks = self._parts.networks()
        algorithm, transforms, observed, acted = networks[chosen_policy(list(networks), name, self.directory.path)]
        return Policy(algorithm, transforms, observed, acted, self.clock.env_steps)

    def load_policy(self, checkpoint: str | int = "latest") -> int:
        """Loads only weights, transforms and counters of a checkpoint; returns the number of its environment steps."""

        def load(state: dict[str, Any]) -> None:
            self._parts.rebuild(state)
            load_networks(self.algorithm, self.transforms, state, self.directory.path)
            if words := changed_actions(state, self._parts.spaces()):
                logging.warning("%s, so its actions mean something else here", words)
            self.clock.load_state_dict(state["counters"])
            self.clock.updates = state["learner"]["updates"]

        self.directory.checkpoints.load(checkpoint, load)
        return self.clock.env_steps

    def save(self, best: bool = False, rows: bool = True) -> Path:
        """Writes a checkpoint of the complete state; returns its file.

        Args:
          best: whether to mark the checkpoint as the best one so far.
          rows: whether to also write the replay rows, which can take a long time. A run continues from the newest
            checkpoint that has rows, if there is one.
        """
        stored = self.batches.stored() if rows else None
        path = self.directory.save(self.clock.value, self.state_dict(), stored, best)
        if rows:
            self._saved_iterations = self.clock.iterations
        return path

    def state_dict(self) -> dict[str, Any]:
        listeners = self._notifier.state_dict()
        return {**self._loop.state_dict(), "listeners": listeners, "config": self.directory.saved_config()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`.

        Raises:
          UsageError: the state does not fit this trainer.
          Exception: the state does not come from `state_dict`; the trainer cannot be used afterwards.
        """
        check_like(state, {name: here for name, here in self.state_dict().items() if name in PLAIN_STATE})
        self._loop.load_state_dict(state, self.directory.path)
        if words := changed_actions(state, self._parts.spaces()):
            raise UsageError(f"{words}; continue with the bounds of the training, or start in an empty directory")
        self._notifier.load_state_dict(state["listeners"])
        self._saved_iterations = self.clock.iterations

    def log(self, text: str) -> None:
        """Prints a line above the progress bar, and writes it to `log.txt` once the run has started."""
        line = self.directory.log(text)
        if line is not None and not self._notifier.show(line):
            print_to_stderr(line)

    def _rescue(self) -> None:
        """Saves the last iteration; called from another thread if the main thread does not return."""
        self.log(f"{self.signals.name}: the main thread is blocked in a call; the process is ended")
        if not self.is_saved and self._loop.may_save:
            self.unroller.break_off()
            self.save()
            self.log(f"Saved a checkpoint at {self.clock.value:,} steps")

    def _save_what_is_whole(self) -> None:
        """Saves the last iteration after an error, if the state is complete; rows of the unfinished unroll are lost."""
        if not self._loop.may_save:
            return
        self.unroller.break_off()
        try:
            self.save()
        except DiskError as error:  # the original error must stay visible
            self.log(f"No checkpoint was saved at {self.clock.value:,} steps: {error}")
        else:
            self.log(f"After the error, a checkpoint was saved at {self.clock.value:,} steps")


# Directory of the last run of each metric and listener.
_RUNS: weakref.WeakKeyDictionary[object, Path] = weakref.WeakKeyDictionary()


def _note_use(parts: Sequence[Metric | Listener], root_dir: Path) -> None:
    """Notes metrics and listeners, and warns if another run has used one, whose state then continues in this run."""
    for part in parts:
        with contextlib.suppress(TypeError):  # the class defines __eq__ without __hash__, or has slots
            if (other := _RUNS.get(part, root_dir)) != root_dir:
                words = "The %s of this run was also used by the run in %s, and keeps its state; make one for each run"
                logging.warning(words, type(part).__name__, other)
            _RUNS[part] = root_dir


def _checked(trainer: Trainer) -> Iterator[Report]:
    """Yields the reports of a trainer. Checks its state after the first iteration, long before a checkpoint is due.

    Raises:
      UsageError: a part of the run, such as a listener or a sampler, has a state that a checkpoint cannot hold; or a
        part has changed torch's default dtype.
      RunError: a transform or a network cannot load its own state.
    """
    is_checked = not any(isinstance(listener, CheckpointSaver) for listener in trainer.listeners)
    unsaved = UnsavedAttributes([trainer.algorithm, trainer.transforms], {"num_updates"})
    with calling():  # converts errors of code that users may have written
        for report in trainer.iterate():
            if report.is_summary:  # a check in each iteration would cost time
                refuse_default_dtype(f"{trainer.environment.name}.step or another part")
                for sentence in unsaved.changed():
                    trainer.log(sentence)
            if not is_checked:
                _check_state(trainer)
                is_checked = True
            yield report


def _check_state(trainer: Trainer) -> None:
    """Checks that a checkpoint can hold the state of a run, and that transforms and networks can load theirs."""
    state = trainer.state_dict()
    check_loadable(state)
    if trainer.clock.iterations == 1:  # only once, because replay grows, and loaded states have been checked
        check_loadable(trainer.batches.stored(), "replay")
    for name, part in (("transforms", trainer.transforms), ("algorithm", trainer.algorithm)):
        with calling(f"load_state_dict of the {name}"):
            part.load_state_dict(copy.deepcopy(state[name]))  # a copy, because the part may keep the state


def _close(part: Listener | Batches | Unroller, trainer: Trainer) -> None:
    try:
        with trainer.signals.breaking(), calling(f"{type(part).__name__}.close"):
            part.close()
    except Interrupted:
        trainer.log(f"{type(part).__name__} did not close in time after {trainer.signals.name}")


def _is_done(trainer: Trainer, notifier: Notifier) -> bool:
    return trainer.clock.finished and not notifier.is_behind(trainer)


def _warn_of_settings(trainer: Trainer) -> None:
    """Logs a warning about each setting that is probably a mistake; refuses snapshots that nothing writes."""
    check_snapshots(trainer)
    if replicas.size() > 1 and trainer.learner.is_small and trainer.device.type == "cpu":
        trainer.log(
            "An update takes less than about 2 ms, so sums over several learners may cost more time than they save: "
            "compare env_steps_per_second with that of one learner"
        )
    if trainer.directory.config and not any(isinstance(listener, CheckpointSaver) for listener in trainer.listeners):
        trainer.log(
            "Nothing of this run will be saved: Trainer.listeners has no @CheckpointSaver(), which the default includes"
        )


def _announce(trainer: Trainer) -> None:
    """Logs the algorithm, the environment, the size and the budget of the run."""
    environment, budget, parameters = trainer.environment, trainer.clock.budget, trainer.algorithm.parameters()
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    num_envs = trainer.unroller.num_envs * replicas.size()
    stepping = f" {trainer.unroller.stepping}" if trainer.unroller.stepping else ""
    kind = "game" if isinstance(trainer._parts, JointParts) else "environment"
    acting = f"{counted(num_envs, kind)}{stepping}, " if trainer.batches.acts else ""
    learners = f"{counted(replicas.size(), 'learner')}, " if replicas.is_joined() else ""
    trainer.log(
        f"{trainer._parts.players()} on {environment.name}: {learners}{acting}{trained:,} parameters on "
        f"{trainer.device}, Trainer.{budget.name} = {budget.size:,}"
    )
    rows = trainer.unroller.unroll_length * trainer.unroller.num_columns * replicas.size()
    if budget.name == "num_env_steps" and rows > budget.size:
        trainer.log(
            f"An iteration has {rows:,.0f} steps, more than Trainer.num_env_steps = {budget.size:,}, and a run has at "
            "least one iteration; for a shorter run lower Trainer.unroll_length or the number of environments"
        )
    if line := trainer.batches.few_rows:
        trainer.log(line)
    if environment.remark and trainer.batches.acts:
        trainer.log(environment.remark)
