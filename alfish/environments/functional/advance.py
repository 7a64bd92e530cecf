"""Functional environments: their random numbers, and one vector step as a function of tensors.

A functional environment is a subclass of gymnasium's `FuncEnv` whose methods take and return nests of torch tensors
`[B, ...]`. Methods use torch operations only: they do not read tensor values in Python, draw random numbers, write to
arguments or keep state, so any number of steps can be traced into one graph.

    initial(rng, params) -> state                             reward(state, action, next_state, rng, params) -> [B]
    transition(state, action, rng, params) -> state           terminal(state, rng, params) -> [B] bool
    observation(state, rng, params) -> observation            truncated(state, rng, params) -> [B] bool, optional

Besides gymnasium's `observation_space` and `action_space` of one environment, the class may have these attributes:
- `max_episode_steps`: number of steps after which an episode is truncated; None, the default, means no limit;
- `initial_draws`, `transition_draws`: random numbers that `initial` and one step use: mappings from names to `Uniform`,
  `Normal` or `Integers`; empty by default;
- `truncates`: True if the environment has a method `truncated`;
- `reward_space`: Box of shape (R,) for vector rewards `[B, R]`.

`rng` maps each declared name to a tensor `[B, *shape]`, see `Draws`; `params` is the attribute `default_params`.
All numbers of a vector step come from one tensor `u`, `[B, n]` uniform in [0, 1). A block `[T, B, n]` drawn at once on
a CPU has the same numbers as T tensors `[B, n]` drawn one after another.
"""

import copy
import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from gymnasium.experimental.functional import FuncEnv

from alfish import nest
from alfish.nest import Nest


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Uniform random numbers in [low, high].

    Args:
      low, high: bounds of the numbers.
      shape: shape of the numbers of one environment.
    """

    low: float = 0.0
    high: float = 1.0
    shape: tuple[int, ...] = ()

    def of(self, u: torch.Tensor) -> torch.Tensor:
        """Returns the numbers for `u`, uniform in [0, 1), with the same shape and dtype."""
        return u * (self.high - self.low) + self.low


@dataclasses.dataclass(frozen=True)
class Normal:
    """Standard normal random numbers, between -5.4 and 5.4.

    Args:
      shape: shape of the numbers of one environment.
    """

    shape: tuple[int, ...] = ()

    def of(self, u: torch.Tensor) -> torch.Tensor:
        """Returns the numbers for `u`, uniform in [0, 1), with the same shape and dtype."""
        # `u` is a multiple of 2^-24. The midpoint between `u` and the next multiple is exact in float32, and never 0 or
        # 1, where erfinv would be infinite.
        return torch.erfinv(2 * u - 1 + 2**-24) * math.sqrt(2)


@dataclasses.dataclass(frozen=True)
class Integers:
    """Uniform random integers 0 ... n - 1, int64.

    Args:
      n: exclusive upper bound of the integers, at most 2^24.
      shape: shape of the numbers of one environment.
    """

    n: int
    shape: tuple[int, ...] = ()

    def of(self, u: torch.Tensor) -> torch.Tensor:
        """Returns the numbers for `u`, uniform in [0, 1), with the same shape."""
        return (u * self.n).floor().clamp(max=self.n - 1).to(torch.int64)


Kind: TypeAlias = Uniform | Normal | Integers


class Draws(dict[str, torch.Tensor]):
    """The argument `rng` of an environment's methods: the drawn numbers by name, each `[B, *shape]`.

    Args:
      kinds: declared kind (`Uniform`, `Normal` or `Integers`) of each name.
      u: uniform numbers in [0, 1), `[B, n]` with n = `size(kinds)`.

    Attributes:
      batch_size: number of environments, B.
      device: device of the environments' tensors.
    """

    def __init__(self, kinds: Mapping[str, Kind], u: torch.Tensor):
        self.batch_size, self.device = u.shape[0], u.device
        sizes = [math.prod(kind.shape) for kind in kinds.values()]
        parts = zip(kinds.items(), u.split(sizes, 1) if sizes else ())
        super().__init__((name, kind.of(part.reshape(-1, *kind.shape))) for (name, kind), part in parts)


def size(kinds: Mapping[str, Kind]) -> int:
    """Returns the number of uniform numbers that one environment needs for the given kinds."""
    return sum(math.prod(kind.shape) for kind in kinds.values())


def num_draws(env: FuncEnv) -> int:
    """Returns the number of uniform numbers that one environment needs for a step and a reset."""
    return size(initial_draws(env)) + size(transition_draws(env))


def initial_draws(env: FuncEnv) -> Mapping[str, Kind]:
    return getattr(env, "initial_draws", {})


def transition_draws(env: FuncEnv) -> Mapping[str, Kind]:
    return getattr(env, "transition_draws", {})


def max_episode_steps(env: FuncEnv | type[FuncEnv]) -> int | None:
    return getattr(env, "max_episode_steps", None)


class Outcome(NamedTuple):
    """The result of a vector step before any reset."""

    state: Nest
    clock: torch.Tensor  # [B] int32, number of steps of the current episode
    observation: Nest
    reward: torch.Tensor  # [B], or [B, R]
    terminated: torch.Tensor  # [B] bool
    truncated: torch.Tensor  # [B] bool, False where terminated


class Stepped(NamedTuple):
    """The result of a vector step; `final_observation` differs from `observation` only where an episode ended."""

    state: Nest  # next state; where an episode ended, the first state of the next episode
    clock: torch.Tensor  # [B] int32, number of steps of the current episode
    observation: Nest  # next observation, from which the policy acts
    final_observation: Nest  # observation after the step, before any reset
    reward: torch.Tensor  # [B], or [B, R]
    terminated: torch.Tensor  # [B] bool
    truncated: torch.Tensor  # [B] bool, False where terminated


def begin(env: FuncEnv, u: torch.Tensor) -> tuple[Nest, torch.Tensor, Nest]:
    """Begins an episode in each environment. Leaves of states and observations are contiguous, as in `advance`.

    Args:
      env: functional environment.
      u: uniform numbers in [0, 1), `[B, num_draws(env)]`.

    Returns:
      The state, the clock `[B]` int32 (zeros), and the observation.
    """
    rng, params = draws(env, u)[0], _params(env)
    state = env.initial(rng, params)
    clock = torch.zeros(u.shape[0], dtype=torch.int32, device=u.device)
    return _dense(state), clock, _dense(env.observation(state, rng, params))


def advance(env: FuncEnv, state: Nest, clock: torch.Tensor, action: Nest, u: torch.Tensor) -> Stepped:
    """Makes one vector step; where an episode ends, the next episode begins in the same step.

    Args:
      env: functional environment.
      state: nest of leaves `[B, ...]`.
      clock: number of steps of the current episode, `[B]` int32.
      action: action in the environment's units, leaves `[B, ...]`.
      u: uniform numbers in [0, 1), `[B, num_draws(env)]`.
    """
    at_reset, rng = draws(env, u)
    after, clock, final_observation, *results = step(env, state, clock, action, rng)
    ended, params = results[1] | results[2], _params(env)
    first = env.initial(at_reset, params)
    observation = _dense(nest.where(ended, env.observation(first, at_reset, params), final_observation))
    following = _dense(nest.where(ended, first, after))
    return Stepped(following, clock.masked_fill(ended, 0), observation, final_observation, *results)


def step(env: FuncEnv, state: Nest, clock: torch.Tensor, action: Nest, rng: Draws) -> Outcome:
    """Makes one vector step without resets.

    Args:
      env, state, clock, action: as for `advance`.
      rng: random numbers of `transition`, `reward`, `terminal`, `truncated` and `observation`.
    """
    params, limit = _params(env), max_episode_steps(env)
    after = env.transition(state, action, rng, params)
    reward = env.reward(state, action, after, rng, params)
    terminated = env.terminal(after, rng, params)
    clock = clock + 1
    truncated = torch.zeros_like(terminated) if limit is None else (clock >= limit) & ~terminated
    if truncates(env):
        truncated = truncated | env.truncated(after, rng, params) & ~terminated  # type: ignore[attr-defined]
    observation = _dense(env.observation(after, rng, params))
    return Outcome(_dense(after), clock, observation, reward, terminated, truncated)


def truncates(env: FuncEnv) -> bool:
    return getattr(env, "truncates", False)


def tensors_of(env: FuncEnv) -> dict[str, torch.Tensor]:
    """Returns the attributes of an environment that are tensors, such as the walls of a maze, by name."""
    static = ((name, inspect.getattr_static(env, name)) for name in dir(env))
    return {name: value for name, value in static if isinstance(value, torch.Tensor)}


def with_tensors(env: FuncEnv, tensors: Mapping[str, torch.Tensor]) -> FuncEnv:
    """Returns a shallow copy of an environment with the given tensors as attributes.

    A compiled function takes `tensors_of(env)` as arguments, because a graph cannot contain the environment's tensors:

        CompiledFunction(lambda given: advance(with_tensors(env, given[0]), *given[1:]), (tensors_of(env), ...))
    """
    if not tensors:
        return env
    other = copy.copy(env)
    other.__dict__.update(tensors)
    return other


def draws(env: FuncEnv, u: torch.Tensor) -> tuple[Draws, Draws]:
    """Returns the random numbers for `initial` and for a transition, from `u`, `[B, num_draws(env)]`."""
    at_reset = size(initial_draws(env))
    return Draws(initial_draws(env), u[:, :at_reset]), Draws(transition_draws(env), u[:, at_reset:])


def _dense(nested: Nest) -> Nest:
    """Returns contiguous leaves, because a compiled function requires the same memory layout in all calls."""
    return nest.map(torch.Tensor.contiguous, nested)


def _params(env: FuncEnv) -> Any:
    return getattr(env, "default_params", None)
