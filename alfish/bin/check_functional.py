"""Checks of `alfish check-env` for functional environments."""

import time
from collections.abc import Callable
from typing import Any

import torch
from gymnasium.vector import AutoresetMode

from alfish import nest, specs
from alfish.bin.first_run import rounded
from alfish.compiler.inductor import CompiledFunction, NotCompilable
from alfish.compiler.torch_internals import TorchChanged
from alfish.environments import FunctionalEnvironment, VectorEnvironment
from alfish.environments.functional import SingleEnvironment, advance, tensors_of, with_tensors
from alfish.environments.functional.validation import check_step
from alfish.environments.sequential import SequentialVectorEnv
from alfish.runs import random_state

NUM_ENVS = 1024  # number of environments in the measurement of speed
CHECKED_ENVS, CHECKED_STEPS = 64, 100  # numbers of environments and vector steps in checks of methods
SECONDS = 0.3  # duration of each measurement
TOLERANCE = 1e-3  # tolerance for compiled results: relative for values above 1, absolute for smaller ones


def as_gymnasium(environment: FunctionalEnvironment) -> VectorEnvironment:
    """Returns the same number of environments, stepped one by one in numpy, like gymnasium environments."""

    def single() -> SingleEnvironment:
        env = SingleEnvironment(environment.functional)
        env.observation_space = environment.observation_space  # this space also marks action masks
        if environment.reward_spec.shape:
            env.reward_space = environment.reward_spec
        return env

    env = SequentialVectorEnv([single] * environment.num_envs, AutoresetMode.DISABLED)
    result = VectorEnvironment(env, list(range(environment.num_envs)), autoreset=False)
    result.name, result.env_spec = environment.name, environment.env_spec
    return result


def examine(environment: FunctionalEnvironment) -> tuple[list[str], float]:
    """Checks steps, and prints their speed without and with compilation.

    Returns:
      Sentences about faults, and the number of steps per second without compilation.
    """
    functional = environment.functional
    name = type(functional).__name__
    _check_steps(functional, name)
    arguments = _first_step(functional, NUM_ENVS)
    function, given = _traced(functional), (tensors_of(functional), *arguments)
    plain = _speed(lambda: function(given))
    try:
        compiled = CompiledFunction(function, given)
    except (NotCompilable, TorchChanged) as error:
        _print_speed(f"{rounded(plain)} plain")
        sentence = (
            f"{name} cannot be compiled, so its steps stay slow: {error}; compute with torch operations only, without "
            "Python branches on values, .item() or numpy, and keep constant tensors as attributes"
        )
        return [sentence], plain
    _print_speed(f"{rounded(plain)} plain, {rounded(_speed(lambda: compiled(given)))} compiled")
    expected, found = nest.named_leaves(function(given), "step"), nest.leaves(compiled(given))
    for (path, one), other in zip(expected, found, strict=True):
        size = one.double().abs().clamp(min=1)
        if not bool(((one.double() - other.double()).abs() <= TOLERANCE * size).logical_or(one != one).all()):
            part = path.partition(".")[2]
            return [f"the {part} of {name} differs between compiled and plain execution; report this bug"], plain
    return [], plain


def _check_steps(functional: Any, name: str) -> None:
    """Takes `CHECKED_STEPS` random steps; raises UsageError if a method returns a wrong result."""
    environment = FunctionalEnvironment(functional, range(CHECKED_ENVS))
    environment.reset()
    for _ in range(CHECKED_STEPS):
        action = _random_action(environment)
        u = environment.draw(1)[0]
        check_step(environment.functional, name, environment.state, action, u)
        with torch.no_grad():
            stepped = advance(environment.functional, environment.state, environment.clock, action, u)
        environment.state, environment.clock = stepped.state, stepped.clock


def _first_step(functional: Any, num_envs: int) -> tuple[Any, ...]:
    """Returns the arguments of the first step: state, clock, action and random numbers."""
    environment = FunctionalEnvironment(functional, range(num_envs))
    environment.reset()
    action = _random_action(environment)
    return environment.state, environment.clock, action, environment.draw(1)[0]


def _random_action(environment: FunctionalEnvironment) -> Any:
    with random_state.preserved():
        action = specs.sample(environment.action_spec, environment.num_envs)
    return specs.ActionUnits(environment.action_space, environment.device).to_environment(environment.convert(action))


def _traced(functional: Any) -> Callable[[Any], Any]:
    def step(given: Any) -> Any:
        return advance(with_tensors(functional, given[0]), *given[1:])

    return step


def _speed(step: Callable[[], Any]) -> float:
    """Returns environment steps per second."""
    with torch.no_grad():
        step()
        count, began = 0, time.perf_counter()
        while (seconds := time.perf_counter() - began) < SECONDS:
            step()
            count += 1
    return count * NUM_ENVS / seconds


def _print_speed(words: str) -> None:
    print(f"tensors      {NUM_ENVS:,} environments at once: about {words} steps/s", flush=True)
