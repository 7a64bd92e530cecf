"""The single environments that a vector environment of gymnasium is made of: seeds, generators, methods, processes."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from alfish.environments.sequential import SequentialVectorEnv

# Made of single environments, each with a seed of its own.
ONE_BY_ONE = SyncVectorEnv, AsyncVectorEnv, SequentialVectorEnv


class Members:
    """The members of a vector environment.

    Args:
      env: the vector environment.
      seeds: one a member, for the first reset.

    Attributes:
      first_seeds: the seeds, until the first reset has used them.
      abandoned: whether a step may be under way that never ends.
    """

    def __init__(self, env: VectorEnv, seeds: Sequence[int]):
        self._env = env
        self.first_seeds: Sequence[int] | None = list(seeds)
        self.abandoned = False
        self._one_here: gymnasium.Env | None = None  # where the members are in other processes

    @property
    def have_seeds(self) -> bool:
        """Whether each member takes a seed of its own."""
        return isinstance(self._env.unwrapped, ONE_BY_ONE)

    def seed_argument(self, seeds: Sequence[int | None] | None) -> Any:
        """The argument `seed` of the vector environment's next reset.

        A list for members of one class; a vector environment of its own class takes one number for all.

        Args:
          seeds: one a member; None: `first_seeds`.
        """
        seeds, self.first_seeds = (self.first_seeds if seeds is None else seeds), None
        return seeds if seeds is None or self.have_seeds else seeds[0]

    def curricula(self) -> list[Callable[[float], Any]]:
        """The `set_progress` methods of the members that have one, whatever wraps them."""
        if singles := single_environments(self._env):
            return [one.get_wrapper_attr("set_progress") for one in singles if one.has_wrapper_attr("set_progress")]
        method = getattr(self._env, "set_progress", None)
        return [] if method is None else [method]

    def method(self, name: str) -> Callable[..., Any] | None:
        """A method of the members' class or of a wrapper; None: there is none of this name."""
        env: Any = self._env.unwrapped
        if singles := single_environments(self._env):
            env = singles[0]
        elif isinstance(self._env, AsyncVectorEnv):
            self._one_here = env = self._one_here or self._env.env_fns[0]()
        if not isinstance(env, gymnasium.Env):
            return getattr(env, name, None)
        return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None

    def generator_states(self) -> list[str]:
        """The state of each generator, as text.

        Abandoned members in other processes cannot be asked for theirs: they get new generators.
        """
        return [json.dumps(generator.bit_generator.state) for generator in self._generators()]

    def set_generator_states(self, states: Sequence[str]) -> None:
        generators = self._generators()
        for generator, state in zip(generators, states):
            generator.bit_generator.state = json.loads(state)
        if isinstance(self._env, AsyncVectorEnv):
            self._env.set_attr("np_random", generators)  # those above are copies: the own ones are in the processes

    def close(self) -> None:
        """Closes the vector environment, also where a step is under way."""
        if not isinstance(self._env, AsyncVectorEnv):
            self._env.close()
        elif self.abandoned and self._env._state != AsyncState.DEFAULT:
            _end_processes(self._env)  # gymnasium would wait for the step under way
        else:
            try:
                self._env.close()
            except BaseException:  # also where a signal breaks it off
                _end_processes(self._env)
                raise
        if self._one_here is not None:
            self._one_here.close()

    def _generators(self) -> list[np.random.Generator]:
        """One a member, or one for all in a vector environment of its own class (EnvPool does not use it)."""
        if singles := single_environments(self._env):
            return [env.unwrapped.np_random for env in singles]
        if isinstance(self._env, AsyncVectorEnv):
            if self.abandoned:
                return [np.random.default_rng(int(seed)) for seed in np.random.randint(2**31, size=self._env.num_envs)]
            return list(self._env.get_attr("np_random"))
        generator = getattr(self._env.unwrapped, "np_random", None)
        return [generator] if isinstance(generator, np.random.Generator) else []


def single_environments(env: VectorEnv) -> list[gymnasium.Env]:
    """The environments that are stepped one after another in this process; empty: there are none."""
    return list(env.envs) if isinstance(env, SyncVectorEnv | SequentialVectorEnv) else []


def _end_processes(env: AsyncVectorEnv) -> None:
    """Closes it in whatever state its processes are."""
    env.closed = True
    for process in env.processes:
        process.kill()
    for process, pipe in zip(env.processes, env.parent_pipes):
        process.join()
        if pipe is not None:
            pipe.close()
