"""The unroller that steps environments in this process: bitwise reproducible, and the reference for other unrollers."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import gin
import numpy as np
import torch

from alfish import host, nest
from alfish.algorithms.acting import Actor, StatefulInfo, in_eval_mode, reset_state
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler.numpy_program import quiet
from alfish.data import AlgStep, Ends, Experience, StepType, TimeStep, in_line
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.errors.user_code import calling, refuse, refuse_default_dtype
from alfish.metrics.step_batch import own_info
from alfish.nest import Array, Nest, as_array, as_tensor
from alfish.parameters import NonNegativeInt, Rate, checked
from alfish.runs.random_state import called_apart
from alfish.runs.timer import Timer
from alfish.transforms import Transforms
from alfish.unrollers import rollouts
from alfish.unrollers.episode_runner import run_episodes
from alfish.unrollers.nonfinite import RowCheck
from alfish.unrollers.policy_runner import PolicyRunner
from alfish.unrollers.rollouts import StragglerCut
from alfish.unrollers.unroller import ENVIRONMENT, POLICY, Unroller


class UnrollStart(NamedTuple):
    """The start of an unroll: whether no earlier records contain row 0, and the states before row 0."""

    unseen: bool
    state: Nest
    transform_state: Nest


class Steps(NamedTuple):
    """The vector steps of an unroll so far."""

    rows: list[tuple[TimeStep, Nest, Nest]]  # time step, action and info of each row
    ends: list[tuple[Array, TimeStep]]  # LAST rows that are stored separately, see `SyncUnroller._take_end`
    infos: list[tuple[int, dict[str, Any]]]  # pairs of a step's index and its info


class Arrival(NamedTuple):
    """Values of an unroll that were copied to the host, and its rows.

    Attributes:
      read: result of `rollouts.recorded`, `RowCheck.sign` of each element of `checked`, and `Environment.sign`.
      checked: rows whose values are checked.
      unseen, infos: arguments of `rollouts.records`.
    """

    read: tuple[Nest, list[Any], Any]
    checked: list[TimeStep]
    unseen: bool
    infos: list[tuple[int, dict[str, Any]]]


@gin.configurable(module="alfish.unrollers")
@checked
class SyncUnroller(Unroller):
    """Steps an environment in this process.

    Args:
      environment, algorithm, transforms: parts of the run, see `Unroller`.
      numpy_policy: number of vector steps after which a policy on a CPU acts with numpy, if it can be translated
        (`compiler.numpy_program`). Small networks then act faster; results equal torch's up to rounding. None means
        never.
      overwrite_policy_output: whether the info `executed_action` replaces the stored action, for environments in which
        a human or another controller may act. Off-policy only.
      sync_fraction: fraction of the learners that must finish an unroll, in (0, 1], on-policy only. The other learners
        then end their unrolls at their next vector step (`StragglerCut`). None means that no unroll is ended early.

    Attributes:
      time_step: row from which the policy acts next, row 0 of the next unroll; None before `start`.
      reads_infos: whether records have infos.
    """

    def __init__(
        self,
        environment: Environment,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        numpy_policy: NonNegativeInt | None = 0,
        overwrite_policy_output: bool = False,
        sync_fraction: Rate | None = None,
    ):
        super().__init__(environment, algorithm, transforms)
        self._overwrites = overwrite_policy_output
        if overwrite_policy_output:
            refuse_on_policy(algorithm)
            environment.read_executed_actions()
        self._cut = None if sync_fraction is None else StragglerCut(sync_fraction, algorithm)
        self._steps: Callable[[int], Iterable[int]] = range if self._cut is None else self._cut.steps
        self._device = algorithm.progress.device
        self._ones = np.ones(environment.num_envs, np.int64)
        row_check = RowCheck(() if transforms.encoders else environment.observation_spec)
        self._sign, self._judge = quiet(row_check.sign), row_check.judge
        self._signs: list[tuple[TimeStep, Any]] = []  # rows of the unroll, with their `RowCheck.sign`
        self.time_step: Any = None  # a TimeStep `[B]`; None before the first reset
        actor = Actor(algorithm, transforms)
        self._transform_state, self._initial_state = actor.first_state(environment.num_envs)
        self.reads_infos = True
        self._unseen = False  # True after a reset until the next unroll begins
        self._state = self._initial_state
        self._actor = PolicyRunner(actor, self._initial_state, numpy_policy)
        self._policy, self._step = self._actor.__call__, called_apart(_step_of(self))  # see `time`

    @property
    def start_state(self) -> tuple[Nest, Nest]:
        """Initial state of the policy, and the state of the transforms before `time_step`."""
        return self._initial_state, self._transform_state

    @property
    def _acting_version(self) -> int:
        """`policy_version` of the weights that act."""
        return self.policy_version

    def check_learners(self) -> None:
        if self._cut is not None:
            self._cut.check()

    def ignore_infos(self) -> None:
        super().ignore_infos()
        self.reads_infos = False

    def start(self) -> None:
        """Resets the environment. Without this call, the first unroll resets it."""
        if self.time_step is None:
            self._tell_progress()
            self.time_step = self._reset()
            self._unseen = True

    def unroll(self, length: int, at_random: bool = False) -> Experience:
        """Collects the rows of `length` vector steps.

        On-policy, one more row follows, from whose value returns bootstrap; it is also row 0 of the next unroll. If
        environments make two rows at the end of an episode (`Environment.uneven`), LAST rows are stored separately
        (`Experience.ends`).

        Args:
          length: number of vector steps.
          at_random: whether to execute the algorithm's `random_action` instead of the policy's action.

        Returns:
          Experience with leaves `[length, B, ...]`, on-policy `[length+1, B, ...]`. The action of the additional row is
          never executed. Leaves are numpy arrays or tensors, like the environment's.

        Raises:
          RunError: an environment returned a reward or an observation that is not finite.
        """
        self.start()
        start = self._begin(at_random)
        return self._finish(start, *self._steps_of(length, start.unseen))

    def generate_batch(self, num_steps: int) -> Experience:
        """Collects the rows of the next vector steps; for programs without a trainer.

        Acts with `rollout_step` and the algorithm's current parameters, in eval mode except for modules that explore.
        Each call continues where the previous call ended.

        Args:
          num_steps: number of vector steps, at least 1.

        Returns:
          The result of `unroll` as tensors `[num_steps, B, ...]`, on-policy `[num_steps+1, B, ...]`. If environments
          are `uneven`, LAST rows are inserted (`data.in_line`), so there are more rows. Off-policy, the last action
          leads to row 0 of the next call. On-policy, the last row is row 0 of the next call, and its action is not
          executed. `data.trainable` returns the mask of rows to train on.

        Raises:
          UsageError: fewer than 1 step.
          RunError: an environment returned a reward or an observation that is not finite.
        """
        if num_steps < 1:
            raise UsageError(f"generate_batch was asked for {num_steps} steps; it must be at least 1")
        with in_eval_mode(self._algorithm, explores=True):
            return in_line(nest.tensors(self.unroll(num_steps))).experience

    def generate_episodes(self, num_episodes: int) -> list[Experience]:
        """Collects whole episodes with `rollout_step` and the algorithm's current parameters; see `generate_batch`.

        All environments are reset first, which drops the current episodes of `generate_batch`. The result contains the
        first episodes that start, each to its end, so short episodes are not over-represented.

        Args:
          num_episodes: number of episodes, at least 1.

        Returns:
          The episodes in the order of their starts. An episode of T actions has tensors `[T+1, 1, ...]`, FIRST to LAST.
          The LAST row has the true final observation, discount 0 for a termination and 1 for a truncation; its action
          and info are meaningless.

        Raises:
          UsageError: fewer than 1 episode.
          RunError: an environment returned a reward or an observation that is not finite, or was rebuilt.
        """
        if num_episodes < 1:
            raise UsageError(f"generate_episodes was asked for {num_episodes} episodes; it must be at least 1")
        self._restart_episodes()
        self.start()
        self._at_random = False
        self._refresh()
        with in_eval_mode(self._algorithm, explores=True):
            found = run_episodes(self, num_episodes)
        self._restart_episodes()  # current episodes have lost their beginnings
        return [self._as_experience(*nest.tensors(episode)) for episode in found]

    def time(self, timer: Timer) -> None:
        self._policy, self._step = timer.around(POLICY, self._policy), timer.around(ENVIRONMENT, self._step)

    def state_dict(self) -> dict[str, Any]:
        return {
            "time_step": None if self.time_step is None else list(nest.tensors(self.time_step)),
            "state": nest.plain(nest.tensors(self._state)),
            "transform_state": nest.plain(nest.tensors(self._transform_state)),
            "environment": self.environment.state_dict(),
            "policy_version": self.policy_version,
            "num_calls": self._actor.num_calls,
            "gave_up": self._actor.gave_up,
            **self.calls_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state. Episodes that the environment cannot continue are truncated."""
        self.policy_version = state["policy_version"]
        self.repeat_calls(state)
        if "time_step" not in state:  # another unroller saved the state; new episodes begin
            return
        self._state = nest.to(nest.like(self._state, state["state"]), self._device)
        transform_state = nest.like(self._transform_state, state["transform_state"])
        self._transform_state = nest.to(transform_state, self._device)
        self._actor.num_calls, self._actor.gave_up = state["num_calls"], state.get("gave_up", False)
        goes_on = self.environment.load_state_dict(state["environment"])
        if state["time_step"] is None:
            return
        time_step = TimeStep(*state["time_step"])
        self.time_step = self.environment.convert(time_step)
        if not goes_on:
            self.truncate_episodes()

    def truncate_episodes(self) -> None:
        """Makes the newest rows LAST, because the next step of the environment resets all environments."""
        if self.time_step is None:
            return
        step_type = nest.tensors(self.time_step.step_type)
        last = torch.where(step_type == StepType.PAD, step_type, torch.full_like(step_type, StepType.LAST))
        self.time_step = self.time_step._replace(step_type=self.environment.convert(last))

    def break_off(self) -> None:
        self.time_step = None
        self.environment.abandon()

    def close(self) -> None:
        self.environment.close()

    def act(self) -> tuple[AlgStep, Nest]:
        """Returns the policy's step from `time_step` and the transforms' next state, in arrays or tensors."""
        step, transform_state = self._policy(self.time_step, self._transform_state, self._state)
        if self._at_random:
            step = step._replace(output=self._actor.random_action(self.time_step, self._transform_state))
        if self.stores_states:
            step = step._replace(info=StatefulInfo(step.info, self._state))
        return step, transform_state

    def advance(self, step: AlgStep, transform_state: Nest) -> None:
        """Executes an action; the row that arrives becomes `time_step`."""
        self._state, self._transform_state = step.state, transform_state
        try:
            self.time_step = self._step(self.environment.convert(step.output))
        except Exception:
            # If the environment refuses an action because its own last row was not finite, the error names that row.
            self._judge(nest.map(lambda leaf: as_tensor(leaf)[None], self.time_step), math.nan)
            raise

    def _refresh(self) -> None:
        """Prepares acting with the algorithm's current parameters and buffers."""
        self._actor.refresh()

    def _begin(self, at_random: bool) -> UnrollStart:
        """Begins an unroll at `time_step`."""
        unseen, self._unseen = self._unseen, False
        self._at_random = at_random
        self._refresh()
        self._tell_progress()
        state = self._state
        if state is not None:
            step_type = nest.tensors(self.time_step.step_type, self._device)
            with torch.no_grad():
                state = reset_state(nest.tensors(state), self._initial_state, step_type)
        return UnrollStart(unseen, state, self._transform_state)

    def _finish(self, start: UnrollStart, time_step: TimeStep, rows: Nest, ends: Ends | None) -> Experience:
        """Checks the rows of an unroll, and returns its experience.

        Args:
          start: start of the unroll.
          time_step, rows, ends: rows of the unroll, as `_steps_of` returns them.
        """
        if self._cut is not None:
            self._cut.finish()
        for checked_rows, sign in self._signs:
            self._check(checked_rows, sign)
        self._signs = []
        action, info = rows
        others = action, info, start.state, self._ones * self._acting_version, start.transform_state
        return Experience(time_step, *map(self.environment.convert, others))._replace(ends=ends)

    def _steps_of(self, length: int, unseen: bool) -> tuple[TimeStep, Nest, Ends | None]:
        """Makes the steps of an unroll, and sets `records`; returns time steps, actions with infos, and ends."""
        made = Steps([], [], [])
        for t in self._steps(length):
            seen = self.time_step
            step, transform_state = self.act()
            self.advance(step, transform_state)
            self._keep(made, t, seen, step)
        return self._rows_of(made, length, unseen)

    def _keep(self, made: Steps, t: int, seen: TimeStep, step: AlgStep) -> None:
        """Adds vector step t to the steps of an unroll: the policy's step from `seen`, which led to `time_step`."""
        if info := self._info():
            made.infos.append((t, info))
        action = self._executed(step.output) if self._overwrites else step.output
        if self.environment.broken is not None:
            seen = rollouts.ended(seen, self.environment.broken)
        made.rows.append((seen, action, step.info))
        if self.environment.uneven:
            made.ends.append(self._take_end())

    def _rows_of(self, made: Steps, length: int, unseen: bool) -> tuple[TimeStep, Nest, Ends | None]:
        """Sets `records` to the records of an unroll's steps; returns time steps, actions with infos, and ends."""
        newest = self.time_step
        if self._algorithm.on_policy:
            step, _ = self.act()  # the next unroll acts from this row again, so the state is dropped
            made.rows.append((newest, step.output, step.info))
            newest = None
        time_step, *others = rollouts.stacked(made.rows)
        beside = rollouts.ends_of(made.ends) if made.ends else None
        self._record(time_step, newest, beside, unseen, made.infos)
        if self._cut is not None and len(time_step.step_type) <= length:
            return rollouts.filled_up(time_step, others, beside, length)
        return time_step, others, beside

    def _take_end(self) -> tuple[Array, TimeStep]:
        """Returns which environments ended an episode and were reset in the last step, `[B]` bool, and the step's rows.

        The FIRST rows of the resets replace the LAST rows in `time_step`.
        """
        last, resets = self.time_step, self.environment.take_resets()
        if resets is None:
            return self.environment.convert(self._ones == 0), last
        ended, first = resets
        self.time_step = nest.where(ended, first, last)
        if self.environment.lost is not None:
            ended = ended & ~self.environment.lost
        # An agent that left a game early has a PAD row when the game ends, which is not stored as a LAST row.
        return (ended & (last.step_type != StepType.PAD) if self.environment.has_gaps else ended), last

    def _restart_episodes(self) -> None:
        """Makes the next row the FIRST row of a reset."""
        self.time_step = None
        self._state = self._initial_state
        self._transform_state = nest.to(self._transforms.initial_state(self.environment.num_envs), self._device)

    def _as_experience(self, start: Nest, rows: Nest) -> Experience:
        """Returns an episode of `run_episodes` as experience."""
        (state, transform_state), (time_step, action, info) = start, rows
        if self._overwrites:
            executed = nest.to(time_step.prev_action, self._device)
            action = nest.map(lambda own, other: torch.cat([other[1:], own[-1:]]), action, executed)
        self._check(time_step, self._sign(time_step))
        version = torch.full((1,), self._acting_version, dtype=torch.int64)
        return Experience(time_step, action, info, state, version, transform_state)

    def _info(self) -> dict[str, Any]:
        """Returns the infos of the last step; empty if they are not needed."""
        return own_info(self.environment.infos) if self.reads_infos else {}

    def _tell_progress(self) -> None:
        if self.environment.follows_progress:
            self.environment.set_progress(self._algorithm.progress_number())

    def _reset(self) -> TimeStep:
        return called_apart(_first_rows)(self.environment)

    def _record(self, rows: TimeStep, newest: TimeStep | None, ends: Ends | None, unseen: bool, infos: Any) -> None:
        """Sets `records`, and reads each `RowCheck.sign` in the same copy from the device."""
        given, checked = self._given(rows, newest, ends)
        self._arrive(Arrival(host.read(given), checked, unseen, infos))

    def _given(self, rows: TimeStep, newest: TimeStep | None, ends: Ends | None) -> tuple[Nest, list[TimeStep]]:
        """Returns what is to be read for `Arrival.read`, and `Arrival.checked`."""
        checked = [rows] if ends is None else [rows, ends.time_step]
        signs = list(map(self._sign, checked))
        return (rollouts.recorded(rows, newest, ends, self.shown), signs, self.environment.sign), checked

    def _arrive(self, arrival: Arrival) -> None:
        """Sets `records` and `_signs`."""
        found, signs, sign_of_environment = arrival.read
        self.records = rollouts.records(found, arrival.unseen, arrival.infos)
        self._signs = list(zip(arrival.checked, signs))
        if sign_of_environment is not None:
            self.environment.judge(sign_of_environment)

    def _check(self, time_step: TimeStep, sign: float) -> None:
        self._judge(time_step, sign)

    def _executed(self, action: Nest) -> Nest:
        """Returns the executed actions; where the step was a reset, the policy's actions."""
        acted = as_array(self.time_step.step_type) != StepType.FIRST

        def executed(own: Any, other: Any) -> np.ndarray:
            result = as_array(own).copy()
            result[acted] = as_array(other)[acted]
            return result

        return nest.map(executed, action, self.time_step.prev_action)


def _first_rows(environment: Environment) -> TimeStep:
    with calling(f"{environment.name}.reset"):
        time_step = environment.reset()
    refuse_default_dtype(f"{environment.name}.reset")
    return time_step


def _step_of(unroller: SyncUnroller) -> Callable[[Nest], TimeStep]:
    def step(action: Nest) -> TimeStep:
        try:
            return unroller.environment.step(action)
        except BaseException as error:
            refuse(error, f"{unroller.environment.name}.step")
            raise

    return step


def refuse_on_policy(algorithm: RLAlgorithm) -> None:
    """Raises UsageError if an algorithm is on-policy, and thus learns only from its own actions."""
    if algorithm.on_policy:
        raise UsageError(
            f"overwrite_policy_output stores actions that {type(algorithm).__name__} did not choose, but an on-policy "
            "algorithm can learn only from its own actions; use an off-policy algorithm (SAC, DQN, TD3)"
        )
