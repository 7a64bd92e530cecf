"""The members (single environments) of a vector environment: seeds, generators, methods, processes.

This module also reads and restores states and random generators in the form in which checkpoints store them.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from alfish.environments.sequential import SequentialVectorEnv, close
from alfish.errors.user_code import calling
from alfish.nest import Nest
from alfish.processes.messages import EnvironmentCall
from alfish.runs import random_state
from alfish.runs.checkpoint_file import check_loadable

Generator: TypeAlias = np.random.Generator | np.random.RandomState


def state_of(env: Any, name: str) -> Nest:
    """Returns the result of a vector environment's method `get_state`."""
    with calling(f"{name}.get_state"):
        return env.get_state()


def check_state(env: Any, name: str) -> None:
    """Raises UsageError if the state of a vector environment has a leaf that a checkpoint cannot hold."""
    if hasattr(env, "get_state"):
        check_loadable(state_of(env, name), f"{name}.get_state()")


def to_json(generator: Generator) -> str:
    """Returns the state of a random generator as JSON."""
    state: Any
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    return json.dumps(state, default=np.ndarray.tolist)


def from_json(generator: Generator, state: str) -> None:
    """Restores the state from `to_json` in a generator of the same kind."""
    if isinstance(generator, np.random.RandomState):
        generator.set_state(json.loads(state))
    else:
        generator.bit_generator.state = json.loads(state)


DEATH_SECONDS = 1.0  # longest wait for the exit status of a process whose connection is broken
# Classes of vector environments whose members take one seed each.
ONE_BY_ONE = SyncVectorEnv, AsyncVectorEnv, SequentialVectorEnv


class Members:
    """The members of a vector environment.

    Args:
      env: the vector environment.
      seeds: one seed per member, for the first reset.
      calls: calls to repeat for rebuilt members, by the method's name, see `Environment.call`.

    Attributes:
      progress: argument of `set_progress` for rebuilt members; None means that `set_progress` is not called.
      first_seeds: seeds for the first reset; None after the first reset.
      abandoned: True if a step is running that may never end.
      is_pending: True if a call of the members is still running; `close` then ends their processes.
    """

    def __init__(self, env: VectorEnv, seeds: Sequence[int], calls: Mapping[str, EnvironmentCall]):
        self._env, self._calls = env, calls
        self.progress: float | None = None
        self._inner = env.unwrapped  # the vector environment without vector wrappers
        self.first_seeds: Sequence[int] | None = list(seeds)
        self.abandoned = False
        self.is_pending = False
        # An extra environment in this process, from which `method` returns methods if members are in other processes.
        self._one_here: gymnasium.Env | None = None
        if isinstance(env, SequentialVectorEnv):
            env.prepare = self.prepare

    def follow(self, env: VectorEnv) -> None:
        """Uses `env` from now on, a vector environment with the same kind and number of members as the previous one."""
        self._env, self._inner = env, env.unwrapped

    @property
    def have_seeds(self) -> bool:
        """True if each member takes its own seed."""
        return isinstance(self._inner, ONE_BY_ONE)

    def seed_argument(self, seeds: Sequence[int | None] | None) -> Any:
        """Returns the argument `seed` of the vector environment's next reset.

        The argument is a list if each member takes a seed, else one number.

        Args:
          seeds: one seed per member; None means `first_seeds`.
        """
        seeds, self.first_seeds = (self.first_seeds if seeds is None else seeds), None
        return seeds if seeds is None or self.have_seeds else seeds[0]

    def methods(self, name: str) -> list[Callable[..., Any]]:
        """Returns the method `name` of each member that has one, also of wrappers.

        For members in other processes, returns one function that calls all of them, if all have the method.
        """
        if singles := single_environments(self._env):
            return [one.get_wrapper_attr(name) for one in singles if one.has_wrapper_attr(name)]
        if isinstance(self._inner, AsyncVectorEnv):
            has_one = all(self._inner.call("has_wrapper_attr", name))
            return [functools.partial(self._inner.call, name)] if has_one else []
        method = getattr(self._env, name, None) or getattr(self._inner, name, None)
        return [] if method is None else [method]

    def prepare(self, env: gymnasium.Env) -> None:
        """Repeats, in a rebuilt environment, `set_progress` and the calls that `Environment.call` has made."""
        calls = [] if self.progress is None else [("set_progress", (self.progress,))]
        for name, arguments in [*calls, *((made.name, made.arguments) for made in sorted(self._calls.values()))]:
            if env.has_wrapper_attr(name):
                env.get_wrapper_attr(name)(*arguments)

    def method(self, name: str) -> Callable[..., Any] | None:
        """Returns a method of the members' class or of a wrapper; None if neither has a method of this name."""
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

        After `abandoned` is set, members in other processes are not asked for states, because they may not answer;
        the result then has states of new generators.
        """
        return [to_json(generator) for generator in self._generators()]

    def set_generator_states(self, states: Sequence[str]) -> None:
        """Restores states that `generator_states` returned."""
        generators = self._generators()
        for generator, state in zip(generators, states):
            from_json(generator, state)
        if isinstance(self._inner, AsyncVectorEnv):
            self._inner.set_attr("np_random", generators)  # other processes receive copies

    def seed_processes(self, seeds: Sequence[int]) -> None:
        """Seeds the global generators of members in other processes; does nothing for members in this process."""
        if isinstance(self._inner, AsyncVectorEnv):
            self._inner.set_attr("process_seed", list(seeds))

    def note_failure(self, error: BaseException) -> None:
        """Sets `is_pending` to True if a signal handler raised `error` or a process has died, else to False."""
        self.is_pending = not isinstance(error, Exception) or isinstance(error, EOFError | OSError)

    def deaths(self, error: BaseException) -> str:
        """Returns a clause about the processes of members that have died, if `error` is from a broken connection."""
        if not (isinstance(error, EOFError | OSError) and isinstance(self._inner, AsyncVectorEnv)):
            return ""
        connection.wait([process.sentinel for process in self._inner.processes], DEATH_SECONDS)
        dead = {k: process.exitcode for k, process in enumerate(self._inner.processes) if process.exitcode is not None}
        if not dead:
            return ""
        numbers, status = ", ".join(map(str, dead)), next(iter(dead.values()))
        return f"the processes of environments [{numbers}] died, the first one with exit status {status}"

    def close(self) -> None:
        """Closes the vector environment, even during a step."""
        if not isinstance(self._inner, AsyncVectorEnv):
            close(self._env)
        elif self.is_pending:
            _end_processes(self._inner)  # gymnasium would wait for the end of the call
        else:
            try:
                self._env.close()
            except BaseException:  # environments may raise any exception, and a signal may interrupt the wait
                _end_processes(self._inner)
                raise
        if self._one_here is not None:
            close(self._one_here)

    def _new_seeds(self) -> list[int]:
        return random_state.draw_seeds(self._inner.num_envs)

    def _generators(self) -> list[Generator]:
        """Returns the generator of each member, or the single generator of a vector class.

        The list is empty if the state of a generator cannot be saved.
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
    """Returns the members of a vector environment if it steps them one by one in this process; else []."""
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
