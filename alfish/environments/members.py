"""The members of a vector environment, i.e. its single environments: seeds, generators, methods, processes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from alfish.environments.saved_states import Generator, from_json, to_json
from alfish.environments.sequential import SequentialVectorEnv, close
from alfish.runs import random_state

# Vector environments whose members take one seed each.
ONE_BY_ONE = SyncVectorEnv, AsyncVectorEnv, SequentialVectorEnv


class Members:
    """The members of a vector environment.

    Args:
      env: the vector environment.
      seeds: one per member, for the first reset.

    Attributes:
      first_seeds: the seeds of the first reset; None after it.
      abandoned: True if a step may never end.
    """

    def __init__(self, env: VectorEnv, seeds: Sequence[int]):
        self._env = env
        self._inner = env.unwrapped  # without vector wrappers: it has the members
        self.first_seeds: Sequence[int] | None = list(seeds)
        self.abandoned = False
        self._is_pending = False  # a call of the members has not ended
        self._one_here: gymnasium.Env | None = None  # where the members are in other processes

    @property
    def have_seeds(self) -> bool:
        """True if each member takes a seed of its own."""
        return isinstance(self._inner, ONE_BY_ONE)

    def seed_argument(self, seeds: Sequence[int | None] | None) -> Any:
        """Returns the argument `seed` of the vector environment's next reset.

        It is a list if each member takes a seed, else one number for the whole vector environment.

        Args:
          seeds: one per member; None: `first_seeds`.
        """
        seeds, self.first_seeds = (self.first_seeds if seeds is None else seeds), None
        return seeds if seeds is None or self.have_seeds else seeds[0]

    def curricula(self) -> list[Callable[[float], Any]]:
        """Returns the members' methods `set_progress`, also those of wrapped members."""
        if singles := single_environments(self._env):
            return [one.get_wrapper_attr("set_progress") for one in singles if one.has_wrapper_attr("set_progress")]
        if isinstance(self._inner, AsyncVectorEnv):
            has_one = all(self._inner.call("has_wrapper_attr", "set_progress"))
            return [functools.partial(self._inner.call, "set_progress")] if has_one else []
        method = getattr(self._env, "set_progress", None)
        return [] if method is None else [method]

    def method(self, name: str) -> Callable[..., Any] | None:
        """Returns a method of the members' class or of a wrapper, or None if none has this name."""
        env: Any = self._inner
        if singles := single_environments(self._env):
            env = singles[0]
        elif isinstance(self._inner, AsyncVectorEnv):
            self._one_here = env = self._one_here or self._inner.env_fns[0]()
        if not isinstance(env, gymnasium.Env):
            return getattr(env, name, None)
        return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None

    def generator_states(self) -> list[str]:
        """Returns the state of each random generator as JSON.

        Abandoned members in other processes do not answer, so new generators take the places of theirs.
        """
        return [to_json(generator) for generator in self._generators()]

    def set_generator_states(self, states: Sequence[str]) -> None:
        """Restores `generator_states`."""
        generators = self._generators()
        for generator, state in zip(generators, states):
            from_json(generator, state)
        if isinstance(self._inner, AsyncVectorEnv):
            self._inner.set_attr("np_random", generators)  # these are copies: the members are in other processes

    def seeds_of_restart(self) -> list[int] | None:
        """Returns seeds for the reset after a resume; None: restored generators determine the next episodes.

        They are drawn from a generator that the run restores; else each resume would begin as the run did.
        """
        if isinstance(self._inner, AsyncVectorEnv):
            self._inner.set_attr("process_seed", self._new_seeds())
        if self._generators():
            return None
        return self._new_seeds()

    def note_failure(self, error: BaseException) -> None:
        """Stores whether a call is still pending after `error`: after a signal, and if a process has died."""
        self._is_pending = not isinstance(error, Exception) or isinstance(error, EOFError | OSError)

    def close(self) -> None:
        """Closes the vector environment, also during a step."""
        if not isinstance(self._inner, AsyncVectorEnv):
            close(self._env)
        elif self._is_pending:
            _end_processes(self._inner)  # gymnasium would wait for the end of the call
        else:
            try:
                self._env.close()
            except BaseException:  # the environments may raise anything, and a signal may interrupt the wait
                _end_processes(self._inner)
                raise
        if self._one_here is not None:
            close(self._one_here)

    def _new_seeds(self) -> list[int]:
        return random_state.draw_seeds(self._inner.num_envs)

    def _generators(self) -> list[Generator]:
        """Returns one generator per member, or the only one of a vector class of its own.

        None are returned if one is of a kind whose state cannot be saved.
        """
        if singles := single_environments(self._env):
            found: list[Any] = [getattr(env.unwrapped, "np_random", None) for env in singles]
        elif not isinstance(self._inner, AsyncVectorEnv):
            found = [getattr(self._inner, "np_random", None)]
        elif self.abandoned:
            found = [np.random.default_rng(seed) for seed in self._new_seeds()]
        else:
            found = list(self._inner.get_attr("np_random"))
        return found if all(isinstance(generator, Generator) for generator in found) else []


def single_environments(env: VectorEnv) -> list[gymnasium.Env]:
    """Returns the members of a vector environment that steps them one after another in this process, else none."""
    inner = env.unwrapped
    return list(inner.envs) if isinstance(inner, SyncVectorEnv | SequentialVectorEnv) else []


def _end_processes(env: AsyncVectorEnv) -> None:
    """Closes a vector environment by ending its processes."""
    env.closed = True
    for process in env.processes:
        process.kill()
    for process, pipe in zip(env.processes, env.parent_pipes):
        process.join()
        if pipe is not None:
            pipe.close()
