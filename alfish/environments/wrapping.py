"""Wrappers of single environments: the user's, by name or as callables, and those that processes need."""

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
from gymnasium.vector import VectorEnv

from alfish.environments.finding import name_of
from alfish.environments.sequential import check_ends, close, is_beyond_int64, is_mask, refuse_breach, refuse_vector
from alfish.errors import UsageError, first_line
from alfish.parameters import Range, checked, imports
from alfish.runs import random_state
from alfish.runs.processes import follow
from alfish.user_code import calling, refuse

# A callable, its name, or either with keyword arguments.
Wrapper = Callable[..., gymnasium.Env] | str | Sequence[Any]


def own(arguments: Any) -> Any:
    """Returns arguments for one environment: a deep copy, as the environment may write to them.

    Args:
      arguments: keyword arguments, or a callable. Of a functools.partial the arguments are copied, of any other
        callable nothing. What cannot be copied is shared.
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
    """Raises UsageError if an environment or a wrapper in it has running statistics, as `NormalizeObservation`.

    Each environment would have its own, and evaluation, checkpoints and exported policies none of those in training.
    """
    inside: Any = env
    while isinstance(inside, gymnasium.Env | VectorEnv):
        kinds = {type(value).__name__ for value in vars(inside).values()}
        if any(re.match("Running(Mean|Stat)", kind) for kind in kinds) and getattr(inside, "update_running_mean", True):
            name = type(inside).__name__
            transform = "RewardNormalizer" if "eward" in name else "ObservationNormalizer"
            raise UsageError(
                f"{name} has running statistics, and each environment would have its own: evaluation, checkpoints and "
                f"exported policies would lack those of training; leave it out, and use Trainer.transforms = "
                f"[@{transform}]"
            )
        inside = vars(inside).get("env")


def wrap(env: gymnasium.Env, wrapper: Wrapper) -> gymnasium.Env:
    """Returns an environment inside a wrapper, an entry of `make_environment.wrappers`."""
    make = own(_wrapper(wrapper))
    try:
        wrapped = make(env)
    except TypeError as error:
        words = "required positional argument", "takes no arguments", "unexpected keyword argument"
        if not any(one in str(error) for one in words):
            raise
        raise UsageError(
            f"make_environment.wrappers: {name_of(make)} cannot be called with an environment "
            f"and the arguments that are set: {first_line(error)}; set them in gin, by functools.partial, or as "
            "['module:Name', {'argument': value}]"
        ) from error
    if not isinstance(wrapped, gymnasium.Env):
        raise UsageError(
            f"make_environment.wrappers: {name_of(make)} made a {type(wrapped).__name__}, no gymnasium.Env"
        )
    return wrapped


def _wrapper(wrapper: Any) -> Callable[[gymnasium.Env], gymnasium.Env]:
    """Returns an entry of `wrappers` as a callable, with its keyword arguments."""
    entry = list(wrapper) if isinstance(wrapper, (list, tuple)) else [wrapper, {}]
    is_named = len(entry) == 2 and (isinstance(entry[0], str) or callable(entry[0])) and isinstance(entry[1], Mapping)
    if not is_named:
        raise UsageError(
            f"make_environment.wrappers has {wrapper!r}; an entry is a class, its name, or a list of either and its "
            "keyword arguments, as ['gymnasium.wrappers:TimeLimit', {'max_episode_steps': 1000}]"
        )
    name, keywords = entry
    if callable(name):
        return functools.partial(name, **keywords) if keywords else name
    module, _, attribute = name.partition(":")
    if not attribute:
        raise UsageError(
            f"make_environment.wrappers has {name!r}; a name is a module and a class in it, as in "
            "'gymnasium.wrappers:FlattenObservation'"
        )
    found = getattr(imports.import_named(module, "make_environment.wrappers"), attribute, None)
    if not callable(found):
        raise UsageError(f"make_environment.wrappers has {name!r}, and {module} has no such class or function")
    if imports.is_restricted() and not (inspect.isclass(found) and issubclass(found, gymnasium.Wrapper)):
        # Else a name could call any function of modules that are already imported.
        imports.admit_functions(module, "make_environment.wrappers")
    return functools.partial(found, **keywords)


@gin.configurable(module="alfish.environments")
@checked
class StickyAction(gymnasium.wrappers.StickyAction):
    """Repeats the last action at random in place of the next one, which keeps exploration going in training.

    Args:
      env: the environment to wrap.
      repeat_action_probability: probability per step, in [0, 1).
    """

    def __init__(self, env: gymnasium.Env, repeat_action_probability: Annotated[float, Range(0, 1, below=True)] = 0.25):
        super().__init__(env, repeat_action_probability)


class InProcess:
    """Constructor of environments for gymnasium's async vector environment.

    gymnasium calls it once in this process for the spaces, and once in the environment's process, which leaves signals
    to the trainer and has global random generators of its own: a forked process begins with those of its parent.

    Args:
      make: makes the environment.
      seed: of the generators.
    """

    def __init__(self, make: Callable[[], gymnasium.Env], seed: int):
        self._make, self._seed, self._home = make, seed, os.getpid()
        is_main = threading.current_thread() is threading.main_thread()
        self._followed = self._home if is_main else 0  # see `follow`

    def __call__(self) -> gymnasium.Env:
        if os.getpid() != self._home:
            # The process may be of a server. Ctrl-C is sent to all processes of a terminal.
            follow(self._followed if os.getppid() == self._followed else 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # gymnasium ends processes by SIGTERM
            random_state.seed_all(self._seed)
        with calling("the constructor of an environment"):
            return ScalarReward(self._make())


class ScalarReward(gymnasium.Wrapper):
    """Converts rewards to floats, since arrays of one element break gymnasium's batching.

    A call of sys.exit becomes an error, as for environments in the trainer's process. Breaches of gymnasium's interface
    raise here, because gymnasium would wait for ever for a step whose infos it cannot read.
    """

    def close(self) -> None:
        close(self.env)

    @property
    def process_seed(self) -> int:
        """The seed that the process's random generators were given last. Assigning one seeds them."""
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
    """Returns an info without what gymnasium cannot merge."""
    if not isinstance(info, dict):
        raise TypeError(f"its info is {info!r}, which is no dict")
    return {key: value for key, value in info.items() if not (is_beyond_int64(value) or is_mask(key, info))}
