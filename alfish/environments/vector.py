"""Converts gymnasium's vector environments, in any autoreset mode, to the stream of time steps."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from alfish import nest, specs
from alfish.data import StepType, TimeStep
from alfish.environments import precision
from alfish.environments.environment import Environment
from alfish.environments.masked_observation import marked
from alfish.environments.members import Members, check_state, state_of
from alfish.environments.objectives import declared, named
from alfish.environments.sequential import SequentialVectorEnv, refuse_breach
from alfish.errors import RunError, UsageError
from alfish.errors.user_code import calling, refuse
from alfish.nest import Nest
from alfish.runs import random_state
from alfish.specs import ActionUnits, ObservationUnits


class VectorEnvironment(Environment):
    """A `gymnasium.vector.VectorEnv` whose observations are numpy arrays.

    Args:
      env: vector environment with `metadata['autoreset_mode']`. `env.reward_space`, a Box of shape (R,), declares
        vector rewards.
      seeds: one seed per environment, for the first reset. A vector class registered for an id takes only the first.
      autoreset: whether finished environments are reset automatically. If False and the mode is DISABLED, the caller
        resets them (`reset(seeds, rows)`), as evaluation does.
      action_mask: leaf to mark as the action mask, 'observation:LEAF'; None means that the space already marks its
        mask, if it has one.
      rewards: names of the entries of a vector reward; None means the names in `env.reward_space`, or the indices of
        the entries if there are no names.

    Raises:
      UsageError: the autoreset mode is missing, or a space is not supported.
    """

    def __init__(
        self,
        env: VectorEnv,
        seeds: Sequence[int],
        autoreset: bool = True,
        action_mask: str | None = None,
        rewards: Sequence[str] | None = None,
    ):
        mode = autoreset_mode(env)
        super().__init__(
            env.num_envs,
            env.single_observation_space if action_mask is None else marked(env.single_observation_space, action_mask),
            env.single_action_space,
            named(declared(env), rewards),
        )
        self.env, self._mode = env, mode
        self._members, self._seed = Members(env, seeds, self.calls), seeds[0]
        self.resets_rows = mode == AutoresetMode.DISABLED
        self.seeds_rows = self.resets_rows and self._members.have_seeds
        self.uneven = mode != AutoresetMode.NEXT_STEP and autoreset
        self._sequential = env if isinstance(env, SequentialVectorEnv) and not self.uneven else None
        self.can_replace = self._sequential is not None
        self.can_break_off = self.can_replace and mode == AutoresetMode.NEXT_STEP
        self.follows_progress = bool(self._members.methods("set_progress"))
        self._units = ActionUnits(env.single_action_space)
        self._observed = ObservationUnits(self.observation_space)
        copies = self._sequential is None  # a sequential environment makes a new batch in each step
        read = ObservationUnits(self.observation_space, copies=copies).from_environment
        self._read_step = precision.watched(read, self) if autoreset else read
        self._reads_executed = False
        self._halves = self._halves_of_step()
        self._end_step: Callable[[], Any] | None = None  # function that ends a step that `begin` has begun
        self._was_done = np.zeros(self.num_envs, bool)  # in NEXT_STEP, environments that reset in the next step
        self._resets: tuple[np.ndarray, TimeStep] | None = None
        self._restart = False  # whether the next step resets all environments, after a resume
        self._nothing_began = True  # whether all entries of `_was_done` are False
        # Step types and discounts shared by all steps in which no episode ends, the common case.
        self._quiet = np.full(self.num_envs, StepType.MID, np.int32), np.ones(self.num_envs, np.float32)

    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        options = {"options": {"reset_mask": rows.copy()}} if rows is not None else {}  # gymnasium pops the mask
        is_first = self._members.first_seeds is not None
        seed = self._members.seed_argument(seeds)
        if rows is not None and not self._members.have_seeds:
            seed = None  # a seed would also set the generators of environments that are not reset now
        try:
            observation, self.infos = self.env.reset(seed=seed, **options)
        except BaseException as error:  # the environment or a signal handler may raise any exception
            self._refuse(error, "reset")
            raise
        self._observed.check_kinds(observation, self.name)
        if is_first:
            check_state(self.env, self.name)
        self._was_done[:] = False
        self._nothing_began, self._restart = True, False
        first = self._first(self._observed.from_environment(observation))
        self._check_shapes(first.observation)
        self._check_masks(first.observation)
        return first

    def begin(self, action: Nest) -> None:
        if self._restart or self._halves is None:
            return
        begin, end = self._halves
        try:
            begin(self._units.stretch(self._units.executed(action)))
        except BaseException as error:  # as in `reset`
            self._refuse(error, "step")
            raise
        self._end_step = end

    def step(self, action: Nest) -> TimeStep:
        if self._restart:
            return self.reset()
        executed = self._units.executed(action)
        # The environment receives a copy of the action, because it may write to the action.
        handed = nest.map(_apart, self._units.stretch(executed), executed)
        end_step, self._end_step = self._end_step, None
        try:
            results = self.env.step(handed) if end_step is None else end_step()
            observation, reward, terminated, truncated, self.infos = results
        except BaseException as error:  # as in `reset`
            self._refuse(error, "step")
            raise
        if self._reads_executed:
            executed = self._reported(executed)
        if self._sequential is not None:
            something_ended = self._sequential.something_ended
        else:
            terminated, truncated = np.asarray(terminated), np.asarray(truncated)
            self._check_results(reward, terminated, truncated)
            for name, flag in (("terminated", terminated), ("truncated", truncated)):
                if flag.dtype.kind not in "biu":
                    raise UsageError(f"{self.name}.step returned {name} of dtype {flag.dtype}; it must be bool")
            # Integer flags would index rows instead of masking them.
            terminated, truncated = terminated.astype(bool, copy=False), truncated.astype(bool, copy=False)
            something_ended = bool((terminated | truncated).any())
        if self._masks is not None and self._sequential is None:  # members of a SequentialVectorEnv check masks
            self._observed.check_masks(observation, self.name)
        time_step = self._read_step(observation)
        if self._masks is not None and self._sequential is None:
            ends = False if self._mode == AutoresetMode.SAME_STEP else terminated | truncated
            self._check_masks(time_step, ends)
        if self.broken is not None:
            self.broken = None
        if self._sequential is not None and self._sequential.replaced:
            # The rows of rebuilt environments are FIRST.
            self.broken = np.isin(np.arange(self.num_envs), self._sequential.replaced)
            self._was_done = self._was_done | self.broken
        elif self._nothing_began and not something_ended:
            reward = np.array(reward, np.float32)
            step_type, discount = self._quiet
            return TimeStep(step_type, reward, discount, time_step, executed, self.env_id)
        first, done = self._was_done, terminated | truncated
        if self._mode == AutoresetMode.NEXT_STEP:
            self._was_done, self._nothing_began = done.copy(), not done.any()
        elif self.uneven:
            time_step = self._split_resets(time_step, done)
        elif self._mode == AutoresetMode.SAME_STEP:
            time_step = self._final_observation(time_step, done)
        return self._with_ends(time_step, np.array(reward, np.float32), terminated, done, first, executed)

    def read_executed_actions(self) -> None:
        if self.uneven:
            raise UsageError(
                "executed actions can be read only from environments that reset in the next step; build them with "
                "AutoresetMode.NEXT_STEP"
            )
        self._reads_executed = True
        if isinstance(self.env, SequentialVectorEnv):
            self.env.gathers_infos = True

    def _reported(self, executed: Nest) -> Nest:
        """Returns `executed` with the actions that environments reported in their infos, in the algorithm's units."""
        if "executed_action" not in self.infos:
            return executed
        given = self.infos["executed_action"]
        spoke = np.broadcast_to(self.infos.get("_executed_action", True), self.num_envs)
        if isinstance(given, np.ndarray) and given.dtype == object:
            spoke = spoke & np.array([one is not None for one in given])
        if not spoke.any():
            return executed
        own_form = _as_structured(given, self.env.single_action_space, self.num_envs, spoke)
        reported = self._units.executed(self._units.from_environment(own_form))
        for (name, leaf), spec in zip(nest.named_leaves(reported, "executed_action"), nest.leaves(self.action_spec)):
            if not isinstance(spec, spaces.Box):  # a Box action is clipped
                counts = spec.nvec if isinstance(spec, spaces.MultiDiscrete) else spec.n
                size = 2 if isinstance(spec, spaces.MultiBinary) else counts
                if (((leaf < 0) | (leaf >= size)) & nest.widened(spoke, leaf)).any():
                    raise UsageError(f"{self.name}: the info {name} is not an element of the action space {spec}")

        def choose(own: np.ndarray, new: np.ndarray) -> np.ndarray:
            return np.where(nest.widened(spoke, own), new.astype(own.dtype), own)

        return nest.map(choose, executed, reported)

    def ignore_infos(self) -> None:
        if isinstance(self.env, SequentialVectorEnv) and not self._reads_executed:
            self.env.gathers_infos = False

    def method(self, name: str) -> Callable[..., Any] | None:
        return self._members.method(name)

    def methods(self, name: str) -> list[Callable[..., Any]]:
        return self._members.methods(name) if self.delivers_calls else super().methods(name)

    def set_progress(self, progress: float) -> None:
        self._members.progress = progress
        with calling(f"{self.name}.set_progress"):
            for set_progress in self._members.methods("set_progress"):
                set_progress(progress)

    def tolerate_errors(self, report: Callable[[int, BaseException], None]) -> None:
        if self._sequential is not None:
            self._sequential.report = report

    def replace(self, time_step: TimeStep, rows: np.ndarray) -> TimeStep:
        assert self._sequential is not None
        observations = self._observed.from_environment(self._sequential.replace(rows))
        self._was_done = self._was_done & ~rows
        self._nothing_began = not self._was_done.any()
        first = self._first(observations)
        # Not in place, because returned rows may share memory with these arrays.
        return nest.map(lambda new, old: np.where(nest.widened(rows, new), new, old), first, time_step)

    def break_off(self, time_step: TimeStep, rows: np.ndarray) -> TimeStep:
        if not self.can_break_off:
            return time_step
        assert self._sequential is not None
        rows = rows & np.equal(time_step.step_type, StepType.MID)
        self._sequential.break_off(rows)
        self._was_done = self._was_done | rows
        self._nothing_began = not self._was_done.any()
        return time_step._replace(step_type=np.where(rows, np.int32(StepType.LAST), time_step.step_type))

    @property
    def can_rest(self) -> bool:
        return self._sequential is not None and self.resets_rows

    def rest(self, rows: np.ndarray) -> None:
        assert self._sequential is not None
        self._sequential.break_off(rows)

    def take_resets(self) -> tuple[np.ndarray, TimeStep] | None:
        resets, self._resets = self._resets, None
        return resets

    def state_dict(self) -> dict[str, Any]:
        """Returns the vector environment's state if it has `get_state`, else the states of its random generators.

        Before the first reset the state is empty, because the generators are not seeded yet.
        """
        if self._members.first_seeds is not None:
            return {}
        state: dict[str, Any] = {"was_done": torch.from_numpy(self._was_done.copy())}
        if hasattr(self.env, "get_state") and not self._members.abandoned:
            state["env"] = state_of(self.env, self.name)
        else:
            state["generators"] = self._members.generator_states()
            state["seeds"] = torch.tensor(random_state.derived_seeds(self.num_envs, self._seed))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        if not state:
            return False
        if "env" in state and hasattr(self.env, "set_state"):
            self.reset()
            with calling(f"{self.name}.set_state"):
                self.env.set_state(state["env"])
            self._was_done = state["was_done"].numpy().copy()
            self._nothing_began = not self._was_done.any()
            return True
        # A generator whose state cannot be saved gets a new seed; otherwise it would repeat the run's first episodes.
        seeds = state["seeds"].tolist() if "seeds" in state else random_state.draw_seeds(self.num_envs)
        self._members.seed_processes(seeds)
        self.reset(seeds)
        self._members.set_generator_states(state.get("generators", ()))
        self._restart = True
        return False

    def abandon(self) -> None:
        self._members.abandoned = True
        super().abandon()

    def close(self) -> None:
        if self._end_step is not None:
            self._members.is_pending = True
        with calling(f"{self.name}.close"):
            self._members.close()

    def _halves_of_step(self) -> tuple[Callable[[Any], Any], Callable[[], Any]] | None:
        """Returns functions that begin and end a step of the vector environment; None if its steps cannot be split."""
        env = self.env
        return (env.step_async, env.step_wait) if isinstance(env, gymnasium.vector.AsyncVectorEnv) else None

    def _refuse(self, error: BaseException, method: str) -> None:
        """Records an error of `step` or `reset`, and raises a clearer error in its place if the cause is known."""
        self._members.note_failure(error)
        if deaths := self._members.deaths(error):
            raise RunError(
                f"{self.name}.{method}: {deaths} (a negative status is the number of the signal; -9 is often a lack of "
                "memory: then use fewer environments)"
            ) from error
        refuse_breach(error, self._name_with_wrappers(), method)
        refuse(error, f"{self.name}.{method}")

    def _name_with_wrappers(self) -> str:
        """Returns the name of the environment with the user's wrappers, whose faults look like the environment's."""
        env = next(iter(getattr(self.env, "envs", ())), None)
        names = []
        while isinstance(env, gymnasium.Wrapper):
            if type(env).__module__.partition(".")[0] not in ("gymnasium", "alfish"):
                names.append(type(env).__name__)
            env = env.env
        return (
            f"{self.name} in the wrapper{'s' * (len(names) > 1)} {', '.join(reversed(names))}" if names else self.name
        )

    def _first(self, observation: Nest) -> TimeStep:
        return TimeStep(
            step_type=np.full(self.num_envs, StepType.FIRST, np.int32),
            reward=np.zeros((self.num_envs, *self.reward_spec.shape), np.float32),
            discount=np.ones(self.num_envs, np.float32),
            observation=observation,
            prev_action=nest.map(lambda leaf: np.zeros((self.num_envs, *leaf.shape), leaf.dtype), self.action_spec),
            env_id=self.env_id,
        )

    def _with_ends(
        self,
        observation: Nest,
        reward: np.ndarray,
        terminated: np.ndarray,
        done: np.ndarray,
        first: np.ndarray,
        executed: Nest,
    ) -> TimeStep:
        step_type = np.where(first, StepType.FIRST, np.where(done, StepType.LAST, StepType.MID)).astype(np.int32)
        return TimeStep(
            step_type=step_type,
            reward=_zero_where(first, reward),
            discount=np.where(terminated & ~first, 0, 1).astype(np.float32),
            observation=observation,
            prev_action=nest.map(lambda leaf: _zero_where(first, leaf), executed),
            env_id=self.env_id,
        )

    def _split_resets(self, observation: Nest, done: np.ndarray) -> Nest:
        """Stores the FIRST rows for `take_resets`, and returns the observations of the LAST and MID rows."""
        if self._mode == AutoresetMode.DISABLED:
            after, _ = self.env.reset(options={"reset_mask": done.copy()})  # `infos` keeps the infos of the step
            first, final = self._observed.from_environment(after), observation
            self._check_masks(first, ~done)
        else:
            first, final = observation, self._final_observation(observation, done)
        self._resets = done, self._first(first)
        return final

    def _final_observation(self, observation: Nest, done: np.ndarray) -> Nest:
        """Returns the observations of a step in SAME_STEP, with true final observations where episodes ended."""
        if "final_obs" not in self.infos:
            raise UsageError(
                "the environment resets in the same step but gives no infos['final_obs'], so truncated episodes cannot "
                "be bootstrapped; build the environment with AutoresetMode.NEXT_STEP"
            )
        final = self.infos["final_obs"]
        if not (isinstance(final, np.ndarray) and final.dtype == object):  # already a batch with the usual structure
            return nest.where(done, self._observed.from_environment(final), observation)
        result = nest.map(np.copy, observation)
        for i in np.flatnonzero(done):
            single = self._observed.from_environment(specs.batch_of_one(final[i], self.observation_space))
            nest.map(lambda target, value, i=i: target.__setitem__(i, value[0]), result, single)
        return result


def autoreset_mode(env: VectorEnv) -> AutoresetMode:
    """Returns the autoreset mode in an environment's metadata.

    Raises:
      UsageError: the mode or another attribute of `gymnasium.vector.VectorEnv` is missing, as in vector environments
        for gymnasium before 1.0 (for example those of SuperSuit).
    """
    name = type(env.unwrapped).__name__
    parts = ("num_envs", "single_observation_space", "single_action_space")
    if lacking := [part for part in parts if getattr(env, part, None) is None]:
        raise UsageError(
            f"{name} has no {' and no '.join(lacking)}, which vector environments of gymnasium 1.0 or later have; "
            "convert it in the function that make_environment.env_id refers to"
        )
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        raise UsageError(
            f"{name}.metadata has no 'autoreset_mode', so alfish cannot tell when the environment resets; set it to "
            "one "
            "of gymnasium.vector.AutoresetMode, as in env.metadata = {**env.metadata, 'autoreset_mode': "
            "AutoresetMode.NEXT_STEP}, in the function that makes the environment"
        )
    try:
        return AutoresetMode(mode)
    except ValueError as error:
        raise UsageError(
            f"{name}.metadata['autoreset_mode'] is {mode!r}; it must be one of gymnasium.vector.AutoresetMode: "
            f"{', '.join(map(str, AutoresetMode))}"
        ) from error


def _as_structured(action: Any, space: spaces.Space, num_envs: int, spoke: np.ndarray) -> Nest:
    """Returns the actions in a vector info as a batch `[num_envs, ...]` of the space.

    `spoke` is the mask of the environments that reported an action; at least one entry is True.
    """
    if isinstance(space, spaces.Dict):
        return {key: _as_structured(action[key], child, num_envs, spoke) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        filled = [one if one is not None else space.sample() for one in action]
        return tuple(np.stack([np.asarray(one[i]) for one in filled]) for i in range(len(space.spaces)))
    shape = space.shape or ()
    if isinstance(action, np.ndarray) and action.dtype == object:  # entries are lists, or None for some environments
        blank = np.zeros(shape, space.dtype)
        rows = [np.asarray(one, space.dtype).reshape(shape) if there else blank for one, there in zip(action, spoke)]
        return np.stack(rows)
    return np.asarray(action).reshape(num_envs, *shape)


def _apart(array: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns `array`, or a copy if it shares memory with `other`."""
    return array.copy() if array is other or np.may_share_memory(array, other) else array


def _zero_where(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(nest.widened(rows, values), np.zeros((), values.dtype), values)
