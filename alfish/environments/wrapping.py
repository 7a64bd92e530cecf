"""Wrappers of single environments: the user's, and wrappers for worker processes and networks."""

import contextlib
import copy
import functools
import inspect
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import gin
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from alfish.environments.finding import name_of
from alfish.environments.sequential import check_ends, close, is_beyond_int64, is_mask, refuse_breach, refuse_vector
from alfish.errors import UsageError, first_line
from alfish.errors.user_code import calling, refuse
from alfish.parameters import Range, checked, imports
from alfish.processes.inheritance import follow
from alfish.runs import random_state


class LeftOut(gymnasium.ObservationWrapper):
    """Leaves out parts of a Dict observation that networks cannot process, such as texts.

    Args:
      env: the environment to wrap.
      paths: names of the parts, such as 'mission', or 'goal.text' for a part inside another Dict.

    Raises:
      UsageError: the observation does not have the part, or no part is left.
    """

    def __init__(self, env: gymnasium.Env, paths: Sequence[str]):
        super().__init__(env)
        known = list(_paths(env.observation_space))
        if unknown := [path for path in paths if path not in known]:
            has = f"has {', '.join(known)}" if known else f"is {env.observation_space}, which has no named parts"
            raise UsageError(f"make_environment.leave_out has {unknown[0]!r}, but the observation {has}")
        self._kept = _kept(env.observation_space, set(paths))
        if not self._kept:
            raise UsageError(f"make_environment.leave_out is {[*paths]}, so no part of the observation is left")
        self.observation_space = _part_of(env.observation_space, self._kept)

    def observation(self, observation: Any) -> dict[str, Any]:
        return _without(observation, self._kept)


def _paths(space: spaces.Space, prefix: str = "") -> Iterator[str]:
    """Yields the paths of all parts of a Dict."""
    for key, child in space.items() if isinstance(space, spaces.Dict) else ():
        yield f"{prefix}{key}"
        yield from _paths(child, f"{prefix}{key}.")


def _kept(space: spaces.Space, paths: set[str], prefix: str = "") -> dict[str, Any]:
    """Returns the names of the remaining parts of a Dict, as nested dicts; an empty dict for any other space."""
    kept = {}
    for key, child in space.items() if isinstance(space, spaces.Dict) else ():
        inner = _kept(child, paths, f"{prefix}{key}.")
        if f"{prefix}{key}" not in paths and (inner or not isinstance(child, spaces.Dict)):
            kept[key] = inner
    return kept


def _part_of(space: spaces.Space, kept: dict[str, Any]) -> spaces.Space:
    if not isinstance(space, spaces.Dict):
        return space
    return spaces.Dict({key: _part_of(space[key], inner) for key, inner in kept.items()})


def _without(value: Any, kept: dict[str, Any]) -> Any:
    return {key: _without(value[key], inner) for key, inner in kept.items()} if kept else value


# A wrapper is a callable, the name of a callable, or a list of one of these and keyword arguments.
Wrapper = Callable[..., gymnasium.Env] | str | Sequence[Any]


def own(arguments: Any) -> Any:
    """Returns a deep copy of arguments for one environment, because the environment may write to its arguments.

    Args:
      arguments: keyword arguments, or a callable; for a functools.partial, its arguments are copied. Objects that
        cannot be copied are shared.
    """
    if isinstance(arguments, functools.partial):
        keywords = own(arguments.keywords)
        return functools.partial(own(arguments.func), *map(_copied, arguments.args), **keywords)
    return arguments if callable(arguments) else {name: _copied(value) for name, value in arguments.items()}


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # objects of any kind may raise anything
        return {key: _copied(part) for key, part in value.items()} if isinstance(value, dict) else value


def refuse_statistics(env: gymnasium.Env | VectorEnv) -> None:
    """Raises UsageError if an environment or one of its wrappers keeps running statistics, like `NormalizeObservation`.

    Each environment would have different statistics. Evaluation, checkpoints and exported policies would lack them.
    """
    inside: Any = env
    while isinstance(inside, gymnasium.Env | VectorEnv):
        kinds = {type(value).__name__ for value in vars(inside).values()}
        if any(re.match("Running(Mean|Stat)", kind) for kind in kinds) and getattr(inside, "update_running_mean", True):
            name = type(inside).__name__
            transform = "RewardNormalizer" if "eward" in name else "ObservationNormalizer"
            raise UsageError(
                f"{name} has running statistics, and each environment would have separate statistics: evaluation, "
                "checkpoints and exported policies would lack the statistics of training; leave the wrapper out, and "
                f"use Trainer.transforms = [@{transform}]"
            )
        inside = vars(inside).get("env")


def wrap(env: gymnasium.Env, wrapper: Wrapper) -> gymnasium.Env:
    """Returns an environment inside a wrapper; `wrapper` is an entry of `make_environment.wrappers`."""
    make = own(_wrapper(wrapper))
    try:
        wrapped = make(env)
    except TypeError as error:
        words = "required positional argument", "takes no arguments", "unexpected keyword argument"
        if not any(one in str(error) for one in words):
            raise
        raise UsageError(
            f"make_environment.wrappers: {name_of(make)} cannot be called with an environment "
            f"and the arguments that are set: {first_line(error)}; set them in gin, with functools.partial, or as "
            "['module:Name', {'argument': value}]"
        ) from error
    if not isinstance(wrapped, gymnasium.Env):
        raise UsageError(
            f"make_environment.wrappers: {name_of(make)} returned a {type(wrapped).__name__}, not a gymnasium.Env"
        )
    return wrapped


def _wrapper(wrapper: Any) -> Callable[[gymnasium.Env], gymnasium.Env]:
    """Returns an entry of `wrappers` as a callable that includes the keyword arguments."""
    entry = list(wrapper) if isinstance(wrapper, (list, tuple)) else [wrapper, {}]
    is_named = len(entry) == 2 and (isinstance(entry[0], str) or callable(entry[0])) and isinstance(entry[1], Mapping)
    if not is_named:
        raise UsageError(
            f"make_environment.wrappers has {wrapper!r}; an entry must be a class, the name of a class, or a list of "
            "one of these and a dict of keyword arguments, such as ['gymnasium.wrappers:TimeLimit', "
            "{'max_episode_steps': 1000}]"
        )
    name, keywords = entry
    if callable(name):
        return functools.partial(name, **keywords) if keywords else name
    module, _, attribute = name.partition(":")
    if not attribute:
        raise UsageError(
            f"make_environment.wrappers has {name!r}; a name consists of a module and a class in it, as in "
            "'gymnasium.wrappers:FlattenObservation'"
        )
    found = getattr(imports.import_named(module, "make_environment.wrappers"), attribute, None)
    if not callable(found):
        raise UsageError(f"make_environment.wrappers has {name!r}, but {module} has no such class or function")
    if imports.is_restricted() and not (inspect.isclass(found) and issubclass(found, gymnasium.Wrapper)):
        # Without this check, a name could call any function of modules that are already imported.
        imports.admit_functions(module, "make_environment.wrappers")
    return functools.partial(found, **keywords)


@gin.configurable(module="alfish.environments")
@checked
class StickyAction(gymnasium.wrappers.StickyAction):
    """Sometimes repeats the last action instead of executing the next action; adds exploration in training.

    Args:
      env: the environment to wrap.
      repeat_action_probability: probability that a step repeats the last action, in [0, 1).
    """

    def __init__(self, env: gymnasium.Env, repeat_action_probability: Annotated[float, Range(0, 1, below=True)] = 0.25):
        super().__init__(env, repeat_action_probability)


class InProcess:
    """Constructor of environments for gymnasium's async vector environment.

    gymnasium calls the constructor once in this process to get the spaces, and once in the environment's process. In
    the environment's process, the constructor ignores SIGINT, which the trainer handles, and seeds the global random
    generators, because a forked process begins with a copy of its parent's generators.

    Args:
      make: function that makes the environment.
      seed: seed of the global random generators in the environment's process.
    """

    def __init__(self, make: Callable[[], gymnasium.Env], seed: int):
        self._make = make
        self._seed = seed
        self._home = os.getpid()
        is_main = threading.current_thread() is threading.main_thread()
        self._followed = self._home if is_main else 0  # argument of `follow`

    def __call__(self) -> gymnasium.Env:
        if os.getpid() != self._home:
            # A parent that only starts processes (a fork server) is not followed. `follow` also ignores SIGINT, because
            # Ctrl-C reaches all processes of a terminal.
            follow(self._followed if os.getppid() == self._followed else 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # gymnasium ends processes by SIGTERM
            random_state.seed_all(self._seed)
        with calling("the constructor of an environment"):
            return ScalarReward(self._make())


class ScalarReward(gymnasium.Wrapper):
    """Converts rewards to floats, because arrays of one element break gymnasium's batching.

    A call of sys.exit becomes an error, as for environments in the trainer's process. Violations of gymnasium's
    interface raise an error here, because gymnasium would wait forever for a step whose infos it cannot read.
    """

    def close(self) -> None:
        close(self.env)

    @property
    def process_seed(self) -> int:
        """The last seed of the process's global random generators. Assigning a seed also seeds the generators."""
        return random_state.seed_of_torch()

    @process_seed.setter
    def process_seed(self, seed: int) -> None:
        random_state.seed_all(seed)

    def reset(self, **arguments: Any) -> Any:
        with self._named_errors("reset"):
            observation, info = self.env.reset(**arguments)
            info = _checked_info(info)
        return observation, info

    def step(self, action: Any) -> Any:
        with self._named_errors("step"):
            observation, reward, terminated, truncated, info = self.env.step(action)
            info = _checked_info(info)
            try:
                number = float(reward.item() if isinstance(reward, np.ndarray) else reward)
            except (TypeError, ValueError):
                refuse_vector(reward)
                raise
        check_ends([terminated], [truncated])
        return observation, number, terminated, truncated, info

    @contextlib.contextmanager
    def _named_errors(self, method: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            name = type(self.env.unwrapped).__name__
            refuse_breach(error, name, method)
            refuse(error, f"{name}.{method}")
            raise


def _checked_info(info: Any) -> dict[str, Any]:
    """Returns an info without the entries that gymnasium cannot merge."""
    if not isinstance(info, dict):
        raise TypeError(f"its info is {info!r}, which is not a dict")
    return {key: value for key, value in info.items() if not (is_beyond_int64(value) or is_mask(key, info))}
