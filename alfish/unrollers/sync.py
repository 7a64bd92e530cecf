"""The unroller that steps in this process: the bit-reproducible reference for all others."""

from typing import Any

import gin
import numpy as np
import torch

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm, in_eval_mode
from alfish.compiler.numpy_program import quiet
from alfish.data import AlgStep, Experience, StepType, TimeStep, reset_state
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.nest import Nest, as_array, as_tensor
from alfish.parameters import NonNegativeInt, checked
from alfish.runs.timer import Timer
from alfish.transforms import Transforms
from alfish.unrollers.collector import run_episodes
from alfish.unrollers.nonfinite import check_finite
from alfish.unrollers.policy_runner import PolicyRunner
from alfish.unrollers.uneven_rollout import UnevenRollout
from alfish.unrollers.unroller import ENVIRONMENT, POLICY, SHOWN_FIELDS, StepRecords, Unroller


@gin.configurable(module="alfish.unrollers")
@checked
class SyncUnroller(Unroller):
    """Steps the environment that it is given.

    Args:
      environment, algorithm, transforms: see `Unroller`.
      numpy_policy: vector steps after which acting on a CPU goes through numpy, where the policy can be translated
        (`compiler.numpy_program`): the same to float error, and several times faster for small networks. None: never.
      overwrite_policy_output: off-policy, what is stored as an action is what the environment says was executed (its
        info `executed_action`), by a human, an expert or another controller.

    Attributes:
      time_step: the row to act from, the next unroll's row 0, once `start` was called.
    """

    def __init__(
        self,
        environment: Environment,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        numpy_policy: NonNegativeInt | None = 0,
        overwrite_policy_output: bool = False,
    ):
        super().__init__(environment, algorithm, transforms)
        self._overwrites = overwrite_policy_output
        if overwrite_policy_output:
            refuse_on_policy(algorithm)
            environment.read_executed_actions()
        self._device = algorithm.progress.device
        self._ones = np.ones(environment.num_envs, np.int64)
        self._check_finite = quiet(check_finite)
        self.time_step: Any = None  # a TimeStep `[B]`; None before the first reset
        self._initial_state = nest.to(algorithm.initial_state(environment.num_envs), self._device)
        self._unseen = False  # whether no unroll has begun with it yet
        self._state = self._initial_state
        self._transform_state = nest.to(transforms.initial_state(environment.num_envs), self._device)
        self._actor = PolicyRunner(algorithm, transforms, self._initial_state, numpy_policy)

    @property
    def start_state(self) -> tuple[Nest, Nest]:
        """What the policy begins an episode with, and what transforms carry to the row to act from."""
        return self._initial_state, self._transform_state

    def start(self) -> None:
        """Resets the environment, which the first unroll does otherwise."""
        if self.time_step is None:
            self._tell_progress()
            self.time_step = self._reset()
            self._unseen = True

    def unroll(self, length: int, at_random: bool = False) -> Experience:
        """Acts until there are `length` rows; on-policy, one more follows: row 0 of the next unroll, for its value.

        Where environments make two rows when they end (`Environment.ragged`), a column that ends more often is full
        sooner: the unroll stops then, and shorter columns are filled up with PAD rows. There are `length + 1` rows.

        Args:
          length: rows.
          at_random: execute the algorithm's `random_action` in place of its policy's.

        Returns:
          Experience whose leaves are `[length, B, ...]`, on-policy `[length+1, B, ...]`; the extra row's action is
          never executed. Leaves are as the environment's: arrays on the host, or tensors.

        Raises:
          UsageError: on-policy, the length is 1 and an environment makes two rows when it ends.
          RunError: an environment returned a reward or an observation that is not finite.
        """
        self.start()
        unseen, self._unseen = self._unseen, False
        self._at_random = at_random
        self._actor.refresh()
        self._tell_progress()
        state, transform_state = self._state, self._transform_state
        if state is not None:
            step_type = as_tensor(self.time_step.step_type).to(self._device)
            with torch.no_grad():
                state = reset_state(nest.tensors(state), self._initial_state, step_type)
        unroll = self._unroll_ragged if self.environment.ragged else self._unroll_aligned
        time_step, *rows = unroll(length, unseen)
        self._check(time_step)
        others = *rows, state, self._ones * self.policy_version, transform_state
        return Experience(time_step, *self.environment.convert(others))

    def generate_batch(self, num_steps: int) -> Experience:
        """The rows of the next vector steps, from where the last call left off: `unroll`, without a trainer.

        Acts by `rollout_step`, in eval mode, with the algorithm as it is now.

        Args:
          num_steps: vector steps, at least 1; of environments that reset in the same step (`Environment.ragged`), rows.

        Returns:
          What `unroll` does, in tensors: leaves `[num_steps, B, ...]`, the next call's row 0 being where the last
          action arrives; on-policy `[num_steps+1, B, ...]`. `data.trainable` says which rows train.

        Raises:
          UsageError: fewer than 1 step.
          RunError: an environment returned a reward or an observation that is not finite.
        """
        if num_steps < 1:
            raise UsageError(f"generate_batch was asked for {num_steps} steps; it takes at least 1")
        with in_eval_mode(self._algorithm):
            return nest.tensors(self.unroll(num_steps))

    def generate_episodes(self, num_episodes: int) -> list[Experience]:
        """Whole episodes, acted in by `rollout_step`, in eval mode, with the algorithm as it is now.

        All environments are reset first. Episodes are counted when they start, and all that count run to their end, so
        short ones are not favoured. What `generate_batch` had under way is broken off; it goes on with new episodes.

        Args:
          num_episodes: at least 1.

        Returns:
          In the order in which they started: tensors `[T+1, 1, ...]`, FIRST to LAST, of an episode of T actions. The
          LAST row's observation is the true final one, its discount 0 where the episode terminated and 1 where it was
          truncated; its action and info are padding.

        Raises:
          UsageError: fewer than 1 episode.
          RunError: an environment returned a reward or an observation that is not finite, or was built anew.
        """
        if num_episodes < 1:
            raise UsageError(f"generate_episodes was asked for {num_episodes} episodes; it takes at least 1")
        self._begin_anew()
        self.start()
        self._at_random = False
        self._actor.refresh()
        with in_eval_mode(self._algorithm):
            found = run_episodes(self, num_episodes)
        self._begin_anew()  # the episodes under way have lost their beginnings
        return [self._as_experience(*nest.tensors(episode)) for episode in found]

    def time(self, timer: Timer) -> None:
        for name in ("step", "reset"):
            setattr(self.environment, name, timer.around(ENVIRONMENT, getattr(self.environment, name)))
        setattr(self, "act", timer.around(POLICY, self.act))  # noqa: B010, mypy takes no method for a variable

    def state_dict(self) -> dict[str, Any]:
        return {
            "time_step": None if self.time_step is None else list(nest.tensors(self.time_step)),
            "state": nest.plain(nest.tensors(self._state)),
            "transform_state": nest.plain(nest.tensors(self._transform_state)),
            "environment": self.environment.state_dict(),
            "policy_version": self.policy_version,
            "num_calls": self._actor.num_calls,
            "gave_up": self._actor.gave_up,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues. Episodes that the environment cannot continue end here, truncated."""
        self.policy_version = state["policy_version"]
        if "time_step" not in state:  # of an `AsyncUnroller`: new episodes begin
            return
        self._state = nest.to(nest.like(self._state, state["state"]), self._device)
        transform_state = nest.like(self._transform_state, state["transform_state"])
        self._transform_state = nest.to(transform_state, self._device)
        self._actor.num_calls, self._actor.gave_up = state["num_calls"], state.get("gave_up", False)
        goes_on = self.environment.load_state_dict(state["environment"])
        if state["time_step"] is None:
            return
        time_step = TimeStep(*state["time_step"])
        if not goes_on:
            time_step = time_step._replace(step_type=torch.full_like(time_step.step_type, StepType.LAST))
        self.time_step = self.environment.convert(time_step)

    def break_off(self) -> None:
        self.time_step = None
        self.environment.abandon()

    def close(self) -> None:
        self.environment.close()

    def act(self) -> tuple[AlgStep, Nest]:
        """The policy's step from `time_step`, and what the transforms carry on; arrays or tensors."""
        step, transform_state = self._actor(self.time_step, self._transform_state, self._state)
        if self._at_random:
            step = step._replace(output=self._actor.random_action(self.time_step, self._transform_state))
        return step, transform_state

    def advance(self, step: AlgStep, transform_state: Nest) -> None:
        """Executes the action; the row that arrives becomes `time_step`."""
        self._state, self._transform_state = step.state, transform_state
        self.time_step = self.environment.step(self.environment.convert(step.output))

    def _unroll_aligned(self, length: int, unseen: bool) -> tuple[TimeStep, Nest, Nest]:
        """Every step is one row of all columns."""
        rows, infos = [], []
        for t in range(length):
            seen = self.time_step
            step, transform_state = self.act()
            self.advance(step, transform_state)
            if self.environment.infos:
                infos.append((t + unseen, self.environment.infos))
            action = self._executed(step.output) if self._overwrites else step.output
            if self.environment.broken is not None:
                seen = _ended(seen, self.environment.broken)
            rows.append((seen, action, step.info))
        last = self.time_step
        if self._algorithm.on_policy:
            step, _ = self.act()  # of the next unroll's row 0, which acts again: its state is dropped
            rows.append((last, step.output, step.info))
        # Field by field, as most are bare leaves: to walk through whole rows takes longer than to stack these.
        time_steps, actions, step_infos = zip(*rows)
        time_step = TimeStep(*[nest.map(_stacked, *field) for field in zip(*time_steps)])
        action = nest.map(_stacked, *actions)
        info = None if step_infos[0] is None else nest.map(_stacked, *step_infos)
        step_type, reward = as_array(time_step.step_type), as_array(time_step.reward)
        if not self._algorithm.on_policy:  # else it is the extra row
            step_type = np.concatenate([step_type, as_array(last.step_type)[None]])
            reward = np.concatenate([reward, as_array(last.reward)[None]])
        self.records = StepRecords(step_type[1 - unseen :], reward[1 - unseen :], infos)
        if self.shown:
            shown = {name: self._arrived(SHOWN_FIELDS[name], time_step, last, unseen) for name in self.shown}
            self.records = self.records._replace(**shown)
        return time_step, action, info

    def _arrived(self, field: str, time_step: TimeStep, last: TimeStep, unseen: bool) -> Nest:
        """A field of the rows of `records`, arrays `[S, B, ...]`.

        Args:
          field: of `TimeStep`.
          time_step: of the unroll, `[T, B]`, on-policy `[T+1, B]`.
          last: the newest row, `[B]`.
          unseen: whether row 0 is new too.
        """
        rows = nest.arrays(getattr(time_step, field))
        if not self._algorithm.on_policy:  # else it is the extra row
            end = nest.arrays(getattr(last, field))
            rows = nest.map(lambda leaf, newest: np.concatenate([leaf, newest[None]]), rows, end)
        return nest.at(rows, slice(1 - unseen, None))

    def _unroll_ragged(self, length: int, unseen: bool) -> tuple[TimeStep, Nest, Nest]:
        """A column gets a row a step, and one more each time its episode ends."""
        if length < 2 and self._algorithm.on_policy:
            raise UsageError(
                "these environments reset in the same step, which needs an unroll length of 2 or more; build them with "
                "AutoresetMode.NEXT_STEP, or raise Trainer.unroll_length"
            )
        rows = UnevenRollout(length + 1, self.environment.env_id)
        if unseen:
            rows.arrive(self.time_step)
        while rows.room > (2 if self._algorithm.on_policy else 1):
            step, transform_state = self.act()
            record = self.environment.convert((step.output, step.info))
            rows.append((self.time_step, *record))
            self.advance(step, transform_state)
            rows.arrive(self.time_step, info=self.environment.infos)
            resets = self.environment.take_resets()
            if resets is not None:
                ended, first = resets
                rows.append((self.time_step, *record), ended)
                rows.arrive(first, ended)
                self.time_step = nest.where(ended, first, self.time_step)
        if self._algorithm.on_policy:
            step, _ = self.act()
            rows.append((self.time_step, *self.environment.convert((step.output, step.info))))
        self.records = rows.records(self.shown)
        return rows.filled_up()

    def _begin_anew(self) -> None:
        """Makes the next row that of a reset."""
        self.time_step = None
        self._state = self._initial_state
        self._transform_state = nest.to(self._transforms.initial_state(self.environment.num_envs), self._device)

    def _as_experience(self, start: Nest, rows: Nest) -> Experience:
        """The experience of one episode of `run_episodes`."""
        (state, transform_state), (time_step, action, info) = start, rows
        if self._overwrites:
            executed = nest.to(time_step.prev_action, self._device)
            action = nest.map(lambda own, other: torch.cat([other[1:], own[-1:]]), action, executed)
        self._check(time_step)
        version = torch.full((1,), self.policy_version, dtype=torch.int64)
        return Experience(time_step, action, info, state, version, transform_state)

    def _tell_progress(self) -> None:
        if self.environment.follows_progress:
            self.environment.set_progress(float(self._algorithm.progress))

    def _reset(self) -> TimeStep:
        return self.environment.reset()

    def _check(self, time_step: TimeStep) -> None:
        self._check_finite(time_step)

    def _executed(self, action: Nest) -> Nest:
        """The action that was executed in the place of the policy's, but where the step was a reset."""
        acted = as_array(self.time_step.step_type) != StepType.FIRST

        def executed(own: Any, other: Any) -> np.ndarray:
            result = as_array(own).copy()
            result[acted] = as_array(other)[acted]
            return result

        return nest.map(executed, action, self.time_step.prev_action)


def refuse_on_policy(algorithm: RLAlgorithm) -> None:
    """Raises UsageError where an algorithm learns from its own actions alone: nobody else's can take their place."""
    if algorithm.on_policy:
        raise UsageError(
            f"overwrite_policy_output stores actions that {type(algorithm).__name__} did not choose, and on-policy it "
            "learns from its own alone; take an off-policy algorithm (SAC, DQN, TD3)"
        )


def _stacked(*leaves: Any) -> Any:
    """One array where all are arrays, which takes a fraction of torch's time; else a tensor."""
    if {*map(type, leaves)} == {np.ndarray}:
        return np.array(leaves)
    return torch.stack([as_tensor(leaf) for leaf in leaves])


def _ended(time_step: TimeStep, broken: np.ndarray) -> TimeStep:
    """A row that was acted from, where some environments (`[B]` bool) were then lost: their episodes ended there."""
    step_type = as_array(time_step.step_type).copy()
    step_type[broken & (step_type == StepType.MID)] = StepType.LAST
    return time_step._replace(step_type=step_type)
