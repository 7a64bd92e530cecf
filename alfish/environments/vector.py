"""gymnasium's vector environments, in any autoreset mode, as the stream of time steps."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from alfish import nest
from alfish.data import StepType, TimeStep
from alfish.environments.environment import Environment
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.specs import ActionUnits


class VectorEnvironment(Environment):
    """A `gymnasium.vector.VectorEnv` whose observations are numpy arrays.

    Args:
      env: any vector environment that publishes `metadata['autoreset_mode']`. A vector reward is declared by
        `env.reward_space`, a Box of shape (R,).
      seeds: one an environment, for the first reset. A vector environment of its own class takes the first seed only.
      first_env_id: the global id of environment 0.
      autoreset: False: under DISABLED, leave resets to the caller (`reset(seeds, rows)`), as evaluation does.

    Raises:
      UsageError: if the mode is not published, or a space cannot be learned from.
    """

    def __init__(self, env: VectorEnv, seeds: Sequence[int], first_env_id: int = 0, autoreset: bool = True):
        mode = autoreset_mode(env)
        reward_space = getattr(env, "reward_space", None)
        num_rewards = None if reward_space is None else reward_space.shape[0]
        super().__init__(
            env.num_envs,
            env.single_observation_space,
            env.single_action_space,
            num_rewards,
            torch.device("cpu"),
            first_env_id,
        )
        self.env = env
        self.seeds_rows = mode == AutoresetMode.DISABLED
        self.ragged = mode != AutoresetMode.NEXT_STEP and autoreset
        self._mode, self._autoreset = mode, autoreset
        self._seeds: Sequence[int] | None = list(seeds)
        self._units = ActionUnits(env.single_action_space)
        self._canonical_units = ActionUnits(env.single_action_space, self.device)
        self._read = observation_reader(env.single_observation_space)
        self._was_done = np.zeros(self.num_envs, bool)  # NEXT_STEP: rows that reset in the next step
        self._resets: tuple[torch.Tensor, TimeStep] | None = None
        self._restart = False  # the next step is a reset of all, after a resume
        # Rows in which nothing ends are the common case, and share these.
        self._mid = torch.full((self.num_envs,), StepType.MID, dtype=torch.int32)
        self._ones = torch.ones(self.num_envs)

    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        seeds, self._seeds = (self._seeds if seeds is None else seeds), None
        options = {"options": {"reset_mask": rows.copy()}} if rows is not None else {}  # gymnasium pops the mask
        observation, self.infos = self.env.reset(seed=self._seed_argument(seeds), **options)
        self._was_done[:] = False
        return self._first(self._read(observation))

    def step(self, action: Nest) -> TimeStep:
        if self._restart:
            self._restart = False
            return self.reset()
        numpy_action = nest.map(torch.Tensor.numpy, action)
        observation, reward, terminated, truncated, self.infos = self.env.step(self._units.to_environment(numpy_action))
        executed = self._canonical_units.executed(action)
        done = terminated | truncated
        first = self._was_done
        if self._mode == AutoresetMode.NEXT_STEP:
            self._was_done = done.copy()
        if not done.any() and not first.any():
            return TimeStep(self._mid, _float32(reward), self._ones, self._read(observation), executed, self.env_id)
        time_step = self._read(observation)
        if self._mode != AutoresetMode.NEXT_STEP and self._autoreset:
            time_step = self._split_resets(observation, time_step, done)
        return self._with_ends(time_step, reward, terminated, done, first, executed)

    def take_resets(self) -> tuple[torch.Tensor, TimeStep] | None:
        resets, self._resets = self._resets, None
        return resets

    def state_dict(self) -> dict[str, Any]:
        """Generators of the environments; all of their state where the vector environment has `get_state`."""
        state: dict[str, Any] = {"was_done": torch.from_numpy(self._was_done.copy())}
        if hasattr(self.env, "get_state"):
            state["env"] = self.env.get_state()
        else:
            state["generators"] = [json.dumps(generator.bit_generator.state) for generator in self._generators()]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self.reset()
        if "env" in state and hasattr(self.env, "set_state"):
            self.env.set_state(state["env"])
            self._was_done = state["was_done"].numpy().copy()
            return True
        generators = self._generators()
        for generator, saved in zip(generators, state.get("generators", ())):
            generator.bit_generator.state = json.loads(saved)
        if isinstance(self.env, AsyncVectorEnv):
            self.env.set_attr("np_random", generators)  # those above are copies: the own ones are in the processes
        self._restart = True
        return False

    def close(self) -> None:
        self.env.close()

    def _generators(self) -> list[np.random.Generator]:
        """One an environment, or one for all in a vector environment of its own class (EnvPool does not use it)."""
        if isinstance(self.env, SyncVectorEnv):
            return [env.unwrapped.np_random for env in self.env.envs]
        if isinstance(self.env, AsyncVectorEnv):
            return list(self.env.get_attr("np_random"))
        generator = getattr(self.env.unwrapped, "np_random", None)
        return [generator] if isinstance(generator, np.random.Generator) else []

    def _seed_argument(self, seeds: Sequence[int | None] | None) -> Any:
        """Lists for environments made one by one; a class of its own takes one number for all (gymnasium refuses)."""
        if seeds is None or isinstance(self.env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            return seeds
        return seeds[0]

    def _first(self, observation: Nest) -> TimeStep:
        return TimeStep(
            step_type=torch.full((self.num_envs,), StepType.FIRST, dtype=torch.int32),
            reward=torch.zeros(self.num_envs, *self.reward_spec.shape),
            discount=torch.ones(self.num_envs),
            observation=observation,
            prev_action=_zero_actions(self.action_spec, self.num_envs),
            env_id=self.env_id,
        )

    def _with_ends(
        self,
        observation: Nest,
        reward: Any,
        terminated: np.ndarray,
        done: np.ndarray,
        first: np.ndarray,
        executed: Nest,
    ) -> TimeStep:
        step_type = np.where(first, StepType.FIRST, np.where(done, StepType.LAST, StepType.MID)).astype(np.int32)
        arrives = torch.from_numpy(~first)
        return TimeStep(
            step_type=torch.from_numpy(step_type),
            reward=_where_rows(arrives, _float32(reward)),
            discount=torch.from_numpy(np.where(terminated & ~first, 0, 1).astype(np.float32)),
            observation=observation,
            prev_action=nest.map(lambda leaf: _where_rows(arrives, leaf), executed),
            env_id=self.env_id,
        )

    def _split_resets(self, observation: Any, time_step: Nest, done: np.ndarray) -> Nest:
        """Keeps the FIRST rows for `take_resets`; returns the observations of the LAST and MID rows."""
        if self._mode == AutoresetMode.DISABLED:
            after, reset_infos = self.env.reset(options={"reset_mask": done.copy()})
            self.infos = {**reset_infos, **self.infos}
            first, final = self._read(after), time_step
        else:
            first, final = time_step, self._final_observation(time_step, done)
        self._resets = torch.from_numpy(done), self._first(first)
        return final

    def _final_observation(self, observation: Nest, done: np.ndarray) -> Nest:
        """SAME_STEP: the observations with the finished environments' final ones in their places."""
        if "final_obs" not in self.infos:
            raise UsageError(
                "the environment resets in the same step but gives no infos['final_obs'], so truncated episodes cannot "
                "be bootstrapped; build it with AutoresetMode.NEXT_STEP"
            )
        final = self.infos["final_obs"]
        if not (isinstance(final, np.ndarray) and final.dtype == object):  # batched, in the observation's own structure
            return nest.where(torch.from_numpy(done), self._read(final), observation)
        result = nest.map(torch.clone, observation)
        for i in np.flatnonzero(done):
            single = self._read(batch_of_one(final[i], self.observation_space))
            nest.map(lambda target, value, i=i: target[i].copy_(value[0]), result, single)
        return result


def autoreset_mode(env: VectorEnv) -> AutoresetMode:
    """The mode an environment publishes; refuses to guess."""
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        raise UsageError(
            f"{type(env.unwrapped).__name__}.metadata has no 'autoreset_mode', so alfish cannot know when it resets; "
            "set it to one of gymnasium.vector.AutoresetMode"
        )
    return AutoresetMode(mode)


def _float32(reward: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(reward, np.float32))


def _zero_actions(spec: Nest, num_envs: int) -> Nest:
    return nest.map(lambda leaf: torch.from_numpy(np.zeros((num_envs, *leaf.shape), leaf.dtype)), spec)


def _where_rows(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(rows.reshape(-1, *[1] * (values.ndim - 1)), values, torch.zeros((), dtype=values.dtype))


def batch_of_one(observation: Any, space: spaces.Space) -> Any:
    """A single observation with a leading dimension of 1."""
    if isinstance(space, spaces.Dict):
        return {key: batch_of_one(observation[key], child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(batch_of_one(part, child) for part, child in zip(observation, space.spaces))
    return np.asarray(observation)[None]


def observation_reader(space: spaces.Space) -> Callable[[Any], Nest]:
    """A function from a batch of gymnasium's observations to tensors of the spec's dtypes; always a copy."""
    if isinstance(space, spaces.Dict):
        readers = {key: observation_reader(child) for key, child in space.spaces.items()}
        return lambda observation: {key: read(observation[key]) for key, read in readers.items()}
    if isinstance(space, spaces.Tuple):
        parts = [observation_reader(child) for child in space.spaces]
        return lambda observation: tuple(read(part) for read, part in zip(parts, observation))
    dtype = np.dtype(np.float32) if space.dtype == np.float64 else space.dtype
    # An environment may reuse its observation buffer, so what is kept must be a copy.
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)) and np.any(space.start):
        return lambda observation: torch.from_numpy(np.asarray(observation, dtype) - space.start)
    return lambda observation: torch.from_numpy(np.array(observation, dtype))
