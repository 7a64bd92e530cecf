"""Checks that the methods of a functional environment return what alfish requires.

An error describes one mistake in one sentence.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv

from alfish import nest, specs
from alfish.environments.functional.advance import (
    Draws,
    Integers,
    Normal,
    Uniform,
    draws,
    initial_draws,
    max_episode_steps,
    num_draws,
    transition_draws,
    truncates,
)
from alfish.errors import UsageError
from alfish.errors.user_code import calling
from alfish.nest import Nest

KINDS = Uniform, Normal, Integers
METHODS = "initial", "transition", "observation", "reward", "terminal"


def check_class(env: FuncEnv, name: str) -> None:
    """Checks an environment's attributes and that no method is missing.

    Args:
      env: functional environment.
      name: name of the environment in messages.

    Raises:
      UsageError: an attribute or a method is missing or has a wrong type, or a method takes wrong arguments.
    """
    for attribute in ("observation_space", "action_space"):
        if not isinstance(getattr(env, attribute, None), spaces.Space):
            raise UsageError(
                f"{name}.{attribute} is {getattr(env, attribute, None)!r}; it must be the space of one environment, "
                "such as gymnasium.spaces.Box(-1, 1, (3,))"
            )
    missing = [method for method in METHODS if getattr(type(env), method, None) is getattr(FuncEnv, method)]
    missing += ["truncated"] * (truncates(env) and not hasattr(env, "truncated"))
    if missing:
        raise UsageError(f"{name} has no method {missing[0]}, which a functional environment needs; add it")
    if hasattr(env, "truncated") and getattr(env, "truncates", None) is None:
        raise UsageError(
            f"{name} has a method `truncated`, but not the attribute `truncates`; set truncates = True in the class so "
            "that the method is called, or truncates = False so that it is not"
        )
    for method in METHODS:
        given = list(inspect.signature(getattr(FuncEnv, method)).parameters)[1:]
        taken = inspect.signature(getattr(env, method))
        try:
            taken.bind(*given)
        except TypeError:
            raise UsageError(
                f"{name}.{method} takes ({', '.join(taken.parameters)}), but is called with ({', '.join(given)}); "
                "declare the arguments of the call"
            ) from None
    for attribute, kinds in (("initial_draws", initial_draws(env)), ("transition_draws", transition_draws(env))):
        wrong = [key for key, kind in dict(kinds).items() if not isinstance(kind, KINDS)]
        if wrong:
            raise UsageError(
                f"{name}.{attribute}[{wrong[0]!r}] is {kinds[wrong[0]]!r}; it must be Uniform(...), Normal(...) or "
                "Integers(...) of alfish.environments.functional"
            )
    limit = max_episode_steps(env)
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise UsageError(f"{name}.max_episode_steps is {limit!r}; it must be an integer of at least 1, or None")


def check_methods(env: FuncEnv, name: str, num_envs: int, device: torch.device) -> None:
    """Calls each method in the first step of episodes, and checks the results.

    Args:
      env: functional environment.
      name: name of the environment in messages.
      num_envs: number of environments, B.
      device: device of the environment's tensors.

    Raises:
      UsageError: see `check_step`.
      CodeError: a method raised an error.
    """
    zeros = specs.zeros(specs.action_spec(env.action_space), (num_envs,), device)
    action = specs.ActionUnits(env.action_space, device).to_environment(zeros)
    u = torch.rand(num_envs, num_draws(env), generator=torch.Generator().manual_seed(0)).to(device)
    check_step(env, name, None, action, u)


def check_step(env: FuncEnv, name: str, state: Nest, action: Nest, u: torch.Tensor) -> None:
    """Checks the result of each method, that a second call returns an equal result, and that arguments do not change.

    Args:
      env: functional environment.
      name: name of the environment in messages.
      state: state to step from; None means the first state of an episode.
      action: action in the environment's units, leaves `[B, ...]`.
      u: uniform numbers in [0, 1), `[B, num_draws(env)]`.

    Raises:
      UsageError: a result does not have the structure, shape, dtype or device that alfish requires, a second call
        returns a different result, or an argument has changed.
      CodeError: a method raised an error.
    """
    at_reset, rng = draws(env, u)
    num_envs, device = u.shape[0], u.device

    def call(method: str, *arguments: Any) -> Nest:
        return _result(env, name, method, arguments)

    first = call("initial", at_reset)
    _check_state(first, f"{name}.initial", num_envs, device)
    _check_observation(call("observation", first, at_reset), env, name, num_envs, device)
    state = first if state is None else state
    after = call("transition", state, action, rng)
    _check_state(after, f"{name}.transition", num_envs, device)
    _check_alike(first, after, name)
    _check_observation(call("observation", after, rng), env, name, num_envs, device)
    reward_space = getattr(env, "reward_space", None)
    shape = (num_envs, *(() if reward_space is None else reward_space.shape))
    reward = call("reward", state, action, after, rng)
    _check_leaf(reward, f"{name}.reward", shape, device)
    if not reward.is_floating_point():
        raise UsageError(
            f"{name}.reward returned {reward.dtype}; a reward must be a float; convert it, for example with "
            ".to(torch.float32)"
        )
    for method in ("terminal", *["truncated"] * truncates(env)):
        flags = call(method, after, rng)
        _check_leaf(flags, f"{name}.{method}", (num_envs,), device)
        if flags.dtype != torch.bool:
            raise UsageError(
                f"{name}.{method} returned {flags.dtype}; it must be torch.bool, for example the result of a comparison"
            )


def _result(env: FuncEnv, name: str, method: str, arguments: Sequence[Any]) -> Nest:
    """Returns the result of a method after calling it twice."""
    given = [leaf for one in arguments for leaf in (one.values() if isinstance(one, Draws) else nest.leaves(one))]
    versions = [leaf._version for leaf in given]
    params = getattr(env, "default_params", None)
    with torch.no_grad(), calling(f"{name}.{method}"):
        result, again = (getattr(env, method)(*arguments, params) for _ in range(2))
    if [leaf._version for leaf in given] != versions:
        raise UsageError(
            f"{name}.{method} writes to a tensor in its arguments, which is still used elsewhere; compute a new "
            "tensor, for example with torch.where"
        )
    if not all(map(_equal, nest.leaves(result), nest.leaves(again))):
        raise UsageError(
            f"two calls of {name}.{method} with the same arguments give different results; draw random numbers with "
            "initial_draws and transition_draws, and keep no state between calls"
        )
    return result


def _equal(one: Any, other: Any) -> bool:
    """Returns whether two leaves have the same values; nan equals nan."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other)
    is_same = one.shape == other.shape and one.dtype == other.dtype
    return is_same and bool(((one == other) | (one != one) & (other != other)).all())


def _check_state(state: Nest, call: str, num_envs: int, device: torch.device) -> None:
    named = nest.named_leaves(state, "state")
    if not named:
        raise UsageError(f"{call} returned a state without tensors; return at least one tensor [{num_envs}, ...]")
    for path, leaf in named:
        shape = (num_envs, *leaf.shape[1:]) if isinstance(leaf, torch.Tensor) else ()
        _check_leaf(leaf, f"{call}: {path}", shape, device)


def _check_alike(state: Nest, after: Nest, name: str) -> None:
    if nest.flatten(state)[1] != nest.flatten(after)[1]:
        raise UsageError(
            f"{name}.transition returned a state whose structure differs from that of {name}.initial: "
            f"{nest.paths(after)} instead of {nest.paths(state)}; return the same parts in the same kinds of tuples "
            "and dicts"
        )
    for (path, before), leaf in zip(nest.named_leaves(state, "state"), nest.leaves(after)):
        if (before.shape, before.dtype) != (leaf.shape, leaf.dtype):
            raise UsageError(
                f"{name}.transition returned {path} as {_words(leaf)}, but {name}.initial as {_words(before)}; return "
                "the same shape and dtype"
            )


def _check_observation(observation: Nest, env: FuncEnv, name: str, num_envs: int, device: torch.device) -> None:
    call = f"{name}.observation"
    spec = specs.map_space(lambda leaf: leaf, env.observation_space)
    if nest.paths(observation) != nest.paths(spec):
        raise UsageError(
            f"{call} returned the parts {nest.paths(observation)}, but the observation_space has {nest.paths(spec)}; "
            "make the two equal"
        )
    for (path, leaf), space in zip(nest.named_leaves(observation, ""), nest.leaves(spec)):
        where = f"{call}: {path}" if path else call
        _check_leaf(leaf, where, (num_envs, *(space.shape or ())), device)
        if leaf.is_floating_point() and np.dtype(space.dtype).kind in "biu":
            raise UsageError(
                f"{where} has {leaf.dtype}, which would be truncated to integers: its space {space} has {space.dtype}; "
                "give the space the dtype of the observation, or cast the observation"
            )


def _check_leaf(leaf: Any, what: str, shape: tuple[int, ...], device: torch.device) -> None:
    if not isinstance(leaf, torch.Tensor):
        raise UsageError(
            f"{what} is a {type(leaf).__name__}; it must be a torch tensor [{shape[0] if shape else 'B'}, ...]"
        )
    if tuple(leaf.shape) != shape:
        raise UsageError(
            f"{what} has the shape {tuple(leaf.shape)}; with {shape[0] if shape else 0} environments it must be {shape}"
        )
    if leaf.device != device:
        raise UsageError(
            f"{what} is on {leaf.device}, but the environments are on {device}; make tensors from the method's "
            "arguments (torch.zeros_like, state.new_zeros), or with device=rng.device"
        )


def _words(leaf: torch.Tensor) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}"
