"""Builds environments from an id or a constructor: `make_environment`."""

import inspect
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gin
import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.experimental.functional import FuncEnv
from gymnasium.vector import AutoresetMode, VectorEnv

from alfish import specs
from alfish.environments import rendering, suites
from alfish.environments.action_bounds import bound_actions, bounded
from alfish.environments.environment import Environment
from alfish.environments.envpools import SinglePool, make_envpool
from alfish.environments.finding import make_single, make_vector_class, name_of, named_kwargs, resolved
from alfish.environments.functional import FunctionalEnvironment, SingleEnvironment
from alfish.environments.functional.single import registered
from alfish.environments.masked_observation import MaskedObservation
from alfish.environments.objectives import VectorRewards, declared
from alfish.environments.sequential import SequentialVectorEnv, refuse_breach
from alfish.environments.simulator import Simulator, SimulatorEnvironment, refuse_second
from alfish.environments.tensor import TensorEnvironment
from alfish.environments.vector import VectorEnvironment
from alfish.environments.wrapping import InProcess, LeftOut, Wrapper, own, refuse_statistics, wrap
from alfish.errors import UsageError
from alfish.errors.user_code import calling, refuse
from alfish.parameters import NonNegativeInt, PositiveFloat, PositiveInt, checked
from alfish.parameters.parts import parameter_names

# Smallest number of environments with which gymnasium's vector class of CartPole is faster than a loop.
MANY_ENVS = 64


@gin.configurable(module="alfish.environments")
@checked
def make_environment(
    env_id: str | Callable[..., Any] | FuncEnv = gin.REQUIRED,
    num_envs: PositiveInt = 1,
    vectorization: Literal["sync", "async", "vector_entry_point", "envpool"] = "sync",
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[Wrapper] = (),
    training_wrappers: Sequence[Wrapper] = (),
    leave_out: Sequence[str] = (),
    seed: NonNegativeInt = 0,
    evaluation: bool = False,
    render_mode: str | None = None,
    action_mask: str | None = None,
    rewards: Sequence[str] | Mapping[str, str] | None = None,
    device: str | None = None,
    index: NonNegativeInt = 0,
    action_bounds: PositiveFloat | Sequence[PositiveFloat] | None = None,
    final_observation: Literal["given", "drop", "before"] = "given",
    spread_first_episodes: bool = True,
) -> Environment:
    """Builds environments that step together.

    A callable that makes a VectorEnv or a Simulator may declare the arguments `num_envs`, `seed` (different in each
    run, worker and evaluation), `device`, `evaluation` and `index`. The callable receives each of these arguments that
    it declares. Values in `env_kwargs` take precedence.

    Args:
      env_id: gymnasium id (`CartPole-v1`, `my_module:MyEnv-v0`), or a callable or its name (`my_module:MyEnv`). The
        callable returns a gymnasium Env or a functional environment (`environments.functional`). A callable with an
        argument `num_envs` returns a VectorEnv of numpy or torch, or an `environments.Simulator`. A functional
        environment may also be given directly.
      num_envs: number of environments, B.
      vectorization: way of stepping the environments. 'sync' steps them in this process, one by one, or in one loop if
        that gives the same results (CartPole). 'async' steps the same episodes in one process for each environment,
        which is faster if a step takes more than about 50 us. 'vector_entry_point' uses the id's own vector class, and
        'envpool' uses EnvPool; both draw different random numbers than 'sync'.
      env_kwargs: arguments of the constructor; each environment receives a deep copy, except of objects that cannot be
        copied. The arguments of wrappers and of a functools.partial are also copied.
      wrappers: wrappers of each single environment, the first innermost. An entry is a callable, the name of a callable
        such as `gymnasium.wrappers:FlattenObservation`, or a list of one of these and a dict of keyword arguments.
      training_wrappers: further wrappers around `wrappers`; evaluation leaves them out.
      leave_out: names of the parts of a Dict observation to leave out, such as 'mission', or 'goal.text' in a nested
        Dict.
      seed: seed of the run, passed by a Trainer; environment i receives the i-th child of its SeedSequence.
      evaluation: whether the environments are for evaluation. If so, `vectorization` is ignored: this process steps
        single environments, which the evaluator resets. With 'envpool', the single environments are EnvPool's. A
        callable with an argument `num_envs` is used as in training.
      render_mode: gymnasium's render mode, such as 'rgb_array'; None means no frames.
      action_mask: source of the mask of allowed actions: 'observation:LEAF', 'info:KEY' or 'method:NAME'; for vector
        classes only 'observation:LEAF'. The mask becomes a leaf of the observation, see
        `environments.masked_observation`. None means no mask.
      rewards: names of the entries of a vector reward, or the source of each entry by its name, such as
        {'speed': 'info:reward_forward'}, see `environments.objectives`; for vector classes only names. None means the
        environment's own reward, a number or a vector.
      device: device of the run, passed by a Trainer; None means the default of the callable, or the CPU for functional
        environments.
      index: index of the worker or group that makes the environments, passed by `AsyncUnroller` and
        `DoubleBufferedUnroller`.
      action_bounds: bound a for entries of Box actions that lack a bound: a positive number, or a number for each
        entry. A missing lower bound becomes -a, and a missing upper bound a. None means that actions keep the bounds of
        their space.
      final_observation: treatment of a truncation without a final observation, for environments of tensors that reset
        in the same step; see `SimulatorEnvironment`.
      spread_first_episodes: whether the first episodes of a simulator begin with random elapsed times, if the
        simulator supports this; otherwise equally long episodes end at the same time. Evaluations always play whole
        episodes.

    Raises:
      UsageError: the id does not exist (the message says what to write instead), an extra is missing, or a space is not
        supported.
    """
    if rewards is not None and not rewards:
        raise UsageError(
            f"make_environment.rewards is {rewards!r}; it must name at least one entry of a vector reward; or leave it "
            "out"
        )
    if render_mode:
        rendering.prepare()
    if not all(isinstance(name, str) for name in env_kwargs or ()):
        raise UsageError(
            f"make_environment.env_kwargs is {env_kwargs!r}; its keys must be names of arguments, in quotes"
        )
    kwargs = dict(env_kwargs or {}) | ({"render_mode": render_mode} if render_mode else {})
    if isinstance(env_id, FuncEnv) and env_kwargs:
        raise UsageError(
            f"make_environment.env_kwargs is {env_kwargs!r}, but env_id is an object; set env_id to the class"
        )
    if isinstance(env_id, str) and vectorization != "envpool":
        env_id = resolved(env_id, kwargs)
    seeds = spawn_seeds(seed, num_envs)
    is_vector = callable(env_id) and "num_envs" in parameter_names(env_id)
    if (wrappers or training_wrappers or leave_out) and (
        is_vector or vectorization in ("vector_entry_point", "envpool")
    ):
        setting = "wrappers" if wrappers or training_wrappers else "leave_out"
        raise UsageError(
            f"make_environment.{setting} applies to single environments, but a vector class has none; leave the "
            "setting out"
        )
    names = _names(rewards) if is_vector or vectorization in ("vector_entry_point", "envpool") else None
    if callable(env_id) and is_vector:
        seeds = spawn_seeds((seed, 1), num_envs) if evaluation else seeds  # different from the seeds of training
        known = {"seed": seeds[0], "device": device, "evaluation": evaluation, "index": index}
        refuse_second(env_id)
        with calling(f"the constructor of {name_of(env_id)}"), named_kwargs(env_id, kwargs):
            env = own(env_id)(num_envs=num_envs, **_asked(env_id, known, kwargs), **own(kwargs))
        bound_actions(env, action_bounds)
        if isinstance(env, Simulator):
            spreads = spread_first_episodes and not evaluation
            environment = SimulatorEnvironment(env, seeds[0], action_mask, names, final_observation, spreads)
            environment.name, environment.stepping = name_of(env_id), "in tensors"
            return environment
        return _adapt(env, seeds, evaluation, env_id, None, action_mask, names, final_observation)
    if vectorization == "envpool" and not evaluation:
        return make_envpool(env_id, num_envs, seeds, own(kwargs), action_mask, names)
    if vectorization == "vector_entry_point" and not evaluation:
        env = make_vector_class(env_id, num_envs, own(kwargs))
        bound_actions(env, action_bounds)
        return _adapt(env, seeds, False, env_id, None, action_mask, names)

    env_spec: EnvSpec | None = None
    made: list[Any] = []  # the first environment, if it was made early to learn its type

    def construct() -> Any:
        if isinstance(env_id, FuncEnv):
            return env_id
        with named_kwargs(env_id, kwargs):
            if callable(env_id):
                is_functional = inspect.isclass(env_id) and issubclass(env_id, FuncEnv)  # takes no render_mode
                return own(env_id)(**own(env_kwargs or {} if is_functional else kwargs))
            make = SinglePool if vectorization == "envpool" else make_single
            return make(env_id, own(kwargs))

    def single() -> gymnasium.Env:
        nonlocal env_spec
        env = made.pop() if made else construct()
        if isinstance(env, FuncEnv):
            env = SingleEnvironment(env, render_mode)
        if not isinstance(env, gymnasium.Env):
            raise UsageError(
                f"make_environment.env_id: {name_of(env_id)} makes a {type(env).__name__}, not a "
                f"gymnasium.Env{suites.other_interface(env)}"
            )
        for wrapper in wrappers:
            env = wrap(env, wrapper)
        env_spec = getattr(env, "spec", None)  # read before training wrappers, which do not change the task
        for wrapper in () if evaluation else training_wrappers:
            env = wrap(env, wrapper)
        refuse_statistics(env)
        env = LeftOut(env, leave_out) if leave_out else env
        if action_bounds is not None:
            env = gymnasium.wrappers.TransformAction(env, _same, bounded(env.action_space, action_bounds))
        specs.check_learnable(env.observation_space, "observation")  # checked before gymnasium batches observations
        specs.check_learnable(env.action_space, "action")
        if rewards is not None or declared(env) is not None:
            env = VectorRewards(env, rewards)
            if vectorization == "async" and not evaluation:
                raise UsageError(
                    "make_environment.vectorization is 'async', which supports only scalar rewards, but the "
                    "environment's reward is a vector; use 'sync', and AsyncUnroller for processes"
                )
        return env if action_mask is None else MaskedObservation(env, action_mask)

    if vectorization == "async" and not evaluation and multiprocessing.current_process().daemon:
        raise UsageError(
            "make_environment.vectorization is 'async', but this process is daemonic, like those of "
            "multiprocessing.Pool, and cannot start processes; use 'sync', or concurrent.futures.ProcessPoolExecutor"
        )
    mode = AutoresetMode.DISABLED if evaluation else AutoresetMode.NEXT_STEP
    # These settings require single environments; functional environments are then stepped one by one, in numpy.
    needs_single = bool(wrappers or leave_out or render_mode or isinstance(rewards, Mapping))
    needs_single |= action_bounds is not None
    needs_single |= bool(training_wrappers and not evaluation)
    needs_single |= action_mask is not None and not action_mask.startswith("observation:")
    steps_here = evaluation or vectorization == "sync"
    try:
        if steps_here and not needs_single and vectorization != "envpool":
            if isinstance(env_id, str):
                with named_kwargs(env_id, kwargs):
                    functional, env_spec = registered(env_id, kwargs)
            else:
                functional = construct()
                made.append(functional)
            if isinstance(functional, FuncEnv):
                in_tensors = FunctionalEnvironment(
                    functional, seeds, device or "cpu", evaluation, action_mask, _names(rewards), env_spec
                )
                in_tensors.name = name_of(env_id)
                return in_tensors
        if vectorization == "async" and not evaluation:
            env = gymnasium.vector.AsyncVectorEnv([InProcess(single, one) for one in seeds], autoreset_mode=mode)
        else:
            env = SequentialVectorEnv([single] * num_envs, mode)
    except (Exception, SystemExit) as error:
        refuse_breach(error, name_of(env_id), "construction")
        refuse(error, f"the constructor of {name_of(env_id)}")
        raise
    return _adapt(env, seeds, evaluation, env_id, env_spec)


def spawn_seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """Returns independent 31-bit seeds; `seed + i` would give environment 1 of run 1 and 0 of run 2 the same seed."""
    return [int(child.generate_state(1)[0] >> 1) for child in np.random.SeedSequence(seed).spawn(count)]


def _asked(make: Callable[..., Any], known: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the known values for the callable's arguments that `kwargs` does not set."""
    free = parameter_names(make) - {*kwargs, *getattr(make, "keywords", ())}
    return {name: value for name, value in known.items() if name in free and value is not None}


def _adapt(
    env: VectorEnv,
    seeds: Sequence[int],
    evaluation: bool,
    env_id: str | Callable[..., Any] | FuncEnv,
    env_spec: EnvSpec | None,
    action_mask: str | None = None,
    rewards: Sequence[str] | None = None,
    final_observation: Literal["given", "drop", "before"] = "given",
) -> Environment:
    """Converts a vector environment to an `Environment`; `action_mask` names a mask that its space does not mark."""
    refuse_statistics(env)
    returns_tensors = isinstance(getattr(env, "device", None), (torch.device, str))
    environment: Environment
    if returns_tensors:
        environment = TensorEnvironment(env, seeds[0], action_mask, rewards, final_observation)
    else:
        environment = VectorEnvironment(env, seeds, autoreset=not evaluation, action_mask=action_mask, rewards=rewards)
    environment.name, environment.env_spec = name_of(env_id), env_spec
    environment.stepping, environment.remark = _stepping(env), _remark(env)
    return environment


def _same(action: Any) -> Any:
    return action


def _stepping(env: VectorEnv) -> str:
    """Returns how a vector environment is stepped, as text after the number of environments in the log."""
    if isinstance(env, SequentialVectorEnv):
        return "" if env.num_envs == 1 else "one by one" if env.joint is None else "in one loop"
    if isinstance(env, gymnasium.vector.AsyncVectorEnv):
        return "one process each"
    return f"in {type(env.unwrapped).__name__}"


def _remark(env: VectorEnv) -> str:
    """Returns a sentence about a vector class that may be faster but draws different random numbers; '' for none."""
    spec = env.envs[0].spec if isinstance(env, SequentialVectorEnv) else None
    if spec is None or spec.vector_entry_point is None or spec.additional_wrappers or env.num_envs < MANY_ENVS:
        return ""
    return (
        f"{spec.id} has a vector class, which is faster with so many environments but draws other random numbers: "
        "make_environment.vectorization = 'vector_entry_point'"
    )


def _names(rewards: Sequence[str] | Mapping[str, str] | None) -> Sequence[str] | None:
    """Returns the names of a vector class's reward entries; raises UsageError if entries have other sources."""
    if isinstance(rewards, Mapping):
        raise UsageError(
            f"make_environment.rewards is {rewards!r}, but the entries of a vector class come only from its vector "
            "reward; give a list of names"
        )
    return rewards
