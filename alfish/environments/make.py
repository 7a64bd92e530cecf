"""Environments from an id or a constructor: `make_environment`."""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import gin
import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv

from alfish import specs
from alfish.environments import rendering
from alfish.environments.environment import Environment
from alfish.environments.masks import MaskedObservation
from alfish.environments.objectives import VectorRewards, declared
from alfish.environments.sequential import SequentialVectorEnv, check_ends, refuse_breach, refuse_vector
from alfish.environments.tensor import TensorEnvironment
from alfish.environments.vector import VectorEnvironment
from alfish.errors import UsageError, exited, first_line
from alfish.parameters import NonNegativeInt, PositiveInt, Range, checked, imports
from alfish.parameters.parts import parameter_names

# A callable, its name, or either with keyword arguments.
Wrapper = Callable[..., gymnasium.Env] | str | Sequence[Any]
# The extra that installs a missing module.
EXTRA_OF_MODULE = {
    "mujoco": "mujoco",
    "ale_py": "atari",
    "Box2D": "box2d",
    "box2d": "box2d",
    "envpool": "envpool",
    "mo_gymnasium": "mo",
}
EXTRA_OF_PREFIX = {"ALE/": "atari"}


@gin.configurable(module="alfish.environments")
@checked
def make_environment(
    env_id: str | Callable[..., Any] = gin.REQUIRED,
    num_envs: PositiveInt = 1,
    vectorization: Literal["sync", "async", "vector_entry_point", "envpool"] = "sync",
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Wrapper] = (),
    training_wrappers: Sequence[Wrapper] = (),
    seed: NonNegativeInt = 0,
    evaluation: bool = False,
    render_mode: str | None = None,
    action_mask: str | None = None,
    rewards: Sequence[str] | Mapping[str, str] | None = None,
) -> Environment:
    """Builds environments that step together.

    Args:
      env_id: a gymnasium id (`CartPole-v1`, `my_module:MyEnv-v0`), or a callable that returns a gymnasium Env, or one
        with an argument `num_envs` that returns a VectorEnv, numpy or torch.
      num_envs: B.
      vectorization: 'sync' steps one by one, in this process; 'async' in a process each (pays above about 50 us per
        step); 'vector_entry_point' takes the id's own vector class; 'envpool' takes EnvPool's.
      env_kwargs: arguments of the constructor.
      wrappers: wrappers of each single environment, the first one innermost. An entry is a callable, its name such as
        `gymnasium.wrappers:FlattenObservation`, or a list of either and its keyword arguments.
      training_wrappers: further wrappers outside `wrappers`, which evaluation leaves out.
      seed: seed of the run; environment i receives the i-th child of its SeedSequence.
      evaluation: builds single environments in this process, whatever `vectorization` is, which the evaluator resets. A
        VectorEnv of the user stays as it is.
      render_mode: gymnasium's render mode.
      action_mask: where the environment has the mask of the actions that it accepts: 'observation:LEAF', 'info:KEY' or
        'method:NAME'; vector classes: 'observation:LEAF'. It becomes a leaf of the observation, see
        `environments.masks`. None: there is no mask.
      rewards: names of the entries of a vector reward, or where each entry is: {'speed': 'info:reward_forward'}, see
        `environments.objectives`; vector classes: names. None: the environment's own reward, a number or a vector.

    Raises:
      UsageError: the id does not exist (the message has close matches), an extra is missing, or a space cannot be
        learned from.
    """
    if render_mode:
        rendering.prepare()
    if not all(isinstance(name, str) for name in env_kwargs or ()):
        raise UsageError(f"make_environment.env_kwargs is {env_kwargs!r}; its keys are names of arguments, in quotes")
    kwargs = dict(env_kwargs or {}) | ({"render_mode": render_mode} if render_mode else {})
    seeds = spawn_seeds(seed, num_envs)
    is_vector = callable(env_id) and "num_envs" in parameter_names(env_id)
    if (wrappers or training_wrappers) and (is_vector or vectorization in ("vector_entry_point", "envpool")):
        raise UsageError("make_environment.wrappers apply to single environments, and a vector class has none")
    names = _names(rewards) if is_vector or vectorization in ("vector_entry_point", "envpool") else None
    if callable(env_id) and is_vector:
        with _named_kwargs(env_id, kwargs):
            env = env_id(num_envs=num_envs, **kwargs)
        return _adapt(env, seeds, evaluation, env_id, None, action_mask, names)
    if vectorization == "envpool" and not evaluation:
        return _make_envpool(env_id, num_envs, seeds, kwargs, action_mask, names)
    if vectorization == "vector_entry_point" and not evaluation:
        env = _make_vector_class(env_id, num_envs, kwargs)
        return _adapt(env, seeds, False, env_id, None, action_mask, names)
    if vectorization == "envpool" and env_id not in gymnasium.registry:
        raise UsageError(
            f"make_environment.env_id: only EnvPool has {env_id!r}, and evaluation uses gymnasium's environments; "
            "bind Trainer.evaluation_environment = @evaluation/make_environment, evaluation/make_environment.env_id to "
            "the same task there, and its vectorization to 'sync'"
        )

    env_spec: EnvSpec | None = None

    def single() -> gymnasium.Env:
        nonlocal env_spec
        with _named_kwargs(env_id, kwargs):
            env = env_id(**kwargs) if callable(env_id) else _make_single(env_id, kwargs)
        if not all(hasattr(env, name) for name in ("reset", "step", "observation_space", "action_space")):
            raise UsageError(f"make_environment.env_id: {_name(env_id)} makes a {type(env).__name__}, no gymnasium.Env")
        for wrapper in wrappers:
            env = _wrapped(env, wrapper)
        env_spec = getattr(env, "spec", None)  # training wrappers do not change the task
        for wrapper in () if evaluation else training_wrappers:
            env = _wrapped(env, wrapper)
        specs.check_learnable(env.observation_space, "observation")  # before gymnasium makes batches of them
        specs.check_learnable(env.action_space, "action")
        if rewards is not None or declared(env) is not None:
            env = VectorRewards(env, rewards)
            if vectorization == "async" and not evaluation:
                raise UsageError(
                    "make_environment.vectorization is 'async', where gymnasium returns one number as the reward, and "
                    "this is a vector; take 'sync', and AsyncUnroller for processes"
                )
        return env if action_mask is None else MaskedObservation(env, action_mask)

    mode = AutoresetMode.DISABLED if evaluation else AutoresetMode.NEXT_STEP
    try:
        if vectorization == "async" and not evaluation:
            env = gymnasium.vector.AsyncVectorEnv([_InProcess(single)] * num_envs, autoreset_mode=mode)
        else:
            env = SequentialVectorEnv([single] * num_envs, mode)
    except Exception as error:
        refuse_breach(error, _name(env_id), "construction")
        raise
    return _adapt(env, seeds, evaluation, env_id, env_spec)


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


class _InProcess:
    """Constructor of environments for gymnasium's async vector environment.

    gymnasium calls it once in this process for the spaces, and once in each environment's process, which leaves signals
    to the trainer.
    """

    def __init__(self, make: Callable[[], gymnasium.Env]):
        self._make, self._home = make, os.getpid()

    def __call__(self) -> gymnasium.Env:
        if os.getpid() != self._home:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes of a terminal
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # gymnasium ends processes by SIGTERM
        try:
            return ScalarReward(self._make())
        except SystemExit as error:
            raise exited(error) from error


class ScalarReward(gymnasium.Wrapper):
    """Converts rewards to floats, since arrays of one element break gymnasium's batching.

    A call of sys.exit becomes an error, as for environments in the trainer's process. Breaches of gymnasium's interface
    raise here, because gymnasium would wait for ever for a step whose infos it cannot read.
    """

    def reset(self, **arguments: Any) -> Any:
        with self._named_errors("reset"):
            observation, info = self.env.reset(**arguments)
            _check_info(info)
        return observation, info

    def step(self, action: Any) -> Any:
        with self._named_errors("step"):
            observation, reward, terminated, truncated, info = self.env.step(action)
            _check_info(info)
        check_ends([terminated], [truncated])
        try:
            number = float(reward.item() if isinstance(reward, np.ndarray) else reward)
        except (TypeError, ValueError):
            refuse_vector(reward)
            raise
        return observation, number, terminated, truncated, info

    @contextlib.contextmanager
    def _named_errors(self, method: str) -> Iterator[None]:
        try:
            yield
        except SystemExit as error:
            raise exited(error) from error
        except Exception as error:
            refuse_breach(error, type(self.env.unwrapped).__name__, method)
            raise


def _check_info(info: Any) -> None:
    if not isinstance(info, dict):
        raise TypeError(f"its info is {info!r}, which is no dict")


def spawn_seeds(seed: int, count: int) -> list[int]:
    """Returns independent 31-bit seeds. With `seed + i`, run 1's environment 1 would equal run 2's environment 0."""
    return [int(child.generate_state(1)[0] >> 1) for child in np.random.SeedSequence(seed).spawn(count)]


def _adapt(
    env: VectorEnv,
    seeds: Sequence[int],
    evaluation: bool,
    env_id: str | Callable[..., Any],
    env_spec: EnvSpec | None,
    action_mask: str | None = None,
    rewards: Sequence[str] | None = None,
) -> Environment:
    """Returns an environment of a vector environment; `action_mask` if its observations are not marked yet."""
    returns_tensors = isinstance(getattr(env, "device", None), (torch.device, str))
    environment: Environment
    if returns_tensors:
        environment = TensorEnvironment(env, seeds[0], action_mask=action_mask, rewards=rewards)
    else:
        environment = VectorEnvironment(env, seeds, autoreset=not evaluation, action_mask=action_mask, rewards=rewards)
    environment.name, environment.env_spec = _name(env_id), env_spec
    return environment


def _names(rewards: Sequence[str] | Mapping[str, str] | None) -> Sequence[str] | None:
    """Returns the names of a vector class's rewards, whose entries come from no other place."""
    if isinstance(rewards, Mapping):
        raise UsageError(
            f"make_environment.rewards is {rewards!r}, and a vector class has its entries in its vector reward only; "
            "name them by a list"
        )
    return rewards


def _name(env_id: str | Callable[..., Any]) -> str:
    made = getattr(env_id, "func", env_id)  # of a partial
    return made if isinstance(made, str) else getattr(made, "__name__", type(made).__name__)


def _wrapped(env: gymnasium.Env, wrapper: Wrapper) -> gymnasium.Env:
    wrapper = _wrapper(wrapper)
    try:
        wrapped = wrapper(env)
    except TypeError as error:
        words = "required positional argument", "takes no arguments", "unexpected keyword argument"
        if not any(one in str(error) for one in words):
            raise
        raise UsageError(
            f"make_environment.wrappers: {_name(wrapper)} cannot be called with an environment "
            f"and the arguments that are set: {first_line(error)}; set them in gin, by functools.partial, or as "
            "['module:Name', {'argument': value}]"
        ) from error
    if not isinstance(wrapped, gymnasium.Env):
        raise UsageError(
            f"make_environment.wrappers: {_name(wrapper)} made a {type(wrapped).__name__}, no gymnasium.Env"
        )
    return wrapped


def _make_single(env_id: str, kwargs: Mapping[str, Any]) -> gymnasium.Env:
    _check_exists(env_id)
    if ":" in str(kwargs.get("env_id")):  # ids like GymV26Environment-v0 make gym's environments
        imports.admit(kwargs["env_id"].partition(":")[0], "make_environment.env_kwargs")
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError, ImportError) as error:
        raise _missing_extra(env_id, error) from error


def _make_vector_class(env_id: Any, num_envs: int, kwargs: Mapping[str, Any]) -> VectorEnv:
    _check_exists(env_id)
    if gymnasium.spec(env_id).vector_entry_point is None:
        raise UsageError(f"{env_id} has no class of its own for vectorization 'vector_entry_point'; take 'sync'")
    with _named_kwargs(env_id, kwargs):
        return gymnasium.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point", **kwargs)


@contextlib.contextmanager
def _named_kwargs(env_id: str | Callable[..., Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Raises UsageError in place of a constructor's TypeError about an unknown keyword argument."""
    try:
        yield
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UsageError(
            f"make_environment: {_name(env_id)} does not take env_kwargs={dict(kwargs)}: {error}"
        ) from error


def _check_exists(env_id: str) -> None:
    imported, module = None, ""
    if ":" in env_id:
        module, _, name = env_id.partition(":")
        if module in EXTRA_OF_MODULE and importlib.util.find_spec(module) is None:
            raise _missing_extra(env_id, ImportError(module))
        env_id = name
        imported = imports.import_named(module, "make_environment.env_id")
    for prefix, extra in EXTRA_OF_PREFIX.items():
        if env_id.startswith(prefix):
            module = {"atari": "ale_py"}[extra]
            if importlib.util.find_spec(module) is None:
                raise UsageError(f"{env_id} needs the extra {extra!r}: pip install 'alfish[{extra}]'")
            gymnasium.register_envs(importlib.import_module(module))
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        close = difflib.get_close_matches(env_id, list(gymnasium.registry), 3, 0.5)
        hint = f"; close ones are {', '.join(close)}" if close else ""
        if callable(getattr(imported, env_id, None)):
            hint = f"; {module}.{env_id} is a class or function, so write @{module}.{env_id} without quotes in gin"
        raise UsageError(f"make_environment.env_id: there is no environment {env_id!r}{hint}") from error


def _missing_extra(env_id: str, error: Exception) -> UsageError:
    words = str(error)
    for module, extra in EXTRA_OF_MODULE.items():
        if module.lower() in words.lower():
            return UsageError(f"{env_id} needs the extra {extra!r}: pip install 'alfish[{extra}]'")
    return UsageError(f"{env_id} cannot be built: {words}")


def _make_envpool(
    env_id: Any,
    num_envs: int,
    seeds: Sequence[int],
    kwargs: Mapping[str, Any],
    action_mask: str | None,
    rewards: Sequence[str] | None,
) -> Environment:
    try:
        import envpool
    except ImportError as error:
        raise UsageError("vectorization 'envpool' needs the extra 'envpool': pip install 'alfish[envpool]'") from error
    if env_id not in envpool.list_all_envs():
        close = difflib.get_close_matches(str(env_id), envpool.list_all_envs(), 3, 0.5)
        raise UsageError(f"EnvPool has no environment {env_id!r}; close ones are {', '.join(close) or 'none'}")
    env: Any = envpool.make_gymnasium(env_id, num_envs=num_envs, seed=list(seeds), **kwargs)
    environment = EnvPoolEnvironment(env, seeds, action_mask=action_mask, rewards=rewards)
    environment.name = env_id
    return environment


class EnvPoolEnvironment(VectorEnvironment):
    """EnvPool's environments, which take their seeds in the constructor."""

    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None):
        self._members.first_seeds = None
        return super().reset(None, rows)
