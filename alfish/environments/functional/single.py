"""One functional environment as a `gymnasium.Env`; registration of ids."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.experimental.functional import FuncEnv

from alfish import nest, specs
from alfish.environments.functional.adapter import SeparateNumbers
from alfish.environments.functional.advance import begin, draws, max_episode_steps, num_draws, step
from alfish.environments.functional.validation import check_class, check_methods
from alfish.errors import UsageError
from alfish.nest import Nest

ENTRY_POINT = f"{__name__}:SingleEnvironment"
KEY = "functional"  # argument of the entry point that names the class


class SingleEnvironment(gymnasium.Env):
    """A functional environment as a `gymnasium.Env`, for films, wrappers and programs that need a single environment.

    A seed gives the same episode as in an evaluation with `FunctionalEnvironment`. A step takes about as long as a step
    of hundreds of environments in `FunctionalEnvironment`.

    Args:
      functional: functional environment, its class, or the name of its class ('my_lab.envs:Catch').
      render_mode: None, or 'rgb_array' for a class with a method `render_image`.
      kwargs: arguments of the class.

    Raises:
      UsageError: a space or an attribute of the class cannot be used, or the class renders no frames.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, functional: FuncEnv | type[FuncEnv] | str, render_mode: str | None = None, **kwargs: Any):
        made: Any = named_class(functional) if isinstance(functional, str) else functional
        self.functional: FuncEnv = made(**kwargs) if callable(made) else made
        name = type(self.functional).__name__
        check_class(self.functional, name)
        if render_mode is not None and type(self.functional).render_image is FuncEnv.render_image:
            raise UsageError(
                f"{name} cannot be filmed: it has no method render_image; write render_image(state, render_state, "
                "params), which returns render_state and a frame [H, W, 3] of uint8"
            )
        self.metadata = self.metadata | {"render_fps": getattr(self.functional, "render_fps", 30)}
        self.render_mode = render_mode
        self.observation_space, self.action_space = self.functional.observation_space, self.functional.action_space
        if (reward_space := getattr(self.functional, "reward_space", None)) is not None:
            self.reward_space = reward_space
        self.spec = EnvSpec(id=name, max_episode_steps=max_episode_steps(self.functional))
        self._numbers = SeparateNumbers([0], num_draws(self.functional), torch.device("cpu"))
        self._state: Nest = None
        self._clock: Any = None
        self._render_state: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        # Seeds of later episodes come from gymnasium's `np_random`, because checkpoints store its state.
        if self._state is None:
            check_methods(self.functional, type(self.functional).__name__, 1, torch.device("cpu"))
        self._numbers.seed([int(self.np_random.integers(2**31)) if seed is None else seed])
        with torch.no_grad():
            self._state, self._clock, observation = begin(self.functional, self._numbers.draw(1)[0])
        return self._own(observation), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        batch = nest.tensors(specs.batch_of_one(action, self.action_space))
        with torch.no_grad():
            rng = draws(self.functional, self._numbers.draw(1)[0])[1]
            result = step(self.functional, self._state, self._clock, batch, rng)
        self._state, self._clock = result.state, result.clock
        reward = result.reward[0].numpy().astype(np.float32)
        ends = bool(result.terminated), bool(result.truncated)
        return self._own(result.observation), reward if reward.shape else float(reward), *ends, {}

    def render(self) -> np.ndarray:
        result = self.functional.render_image(self._state, self._render_state)
        self._render_state, frame = result if isinstance(result, tuple) else (None, result)
        return np.asarray(frame)

    def _own(self, observation: Nest) -> Any:
        """Returns the observation of one environment in the form of its space."""

        def single(leaf: spaces.Space, value: torch.Tensor) -> Any:
            array = value[0].numpy().astype(leaf.dtype)
            return array[()] if isinstance(leaf, spaces.Discrete) else array

        return specs.map_space(single, self.observation_space, observation)


def register(env_id: str, kind: type[FuncEnv], **kwargs: Any) -> None:
    """Registers a functional environment in gymnasium's registry.

    Args:
      env_id: new id, such as 'my_lab/Catch-v0'.
      kind: class of the environment, at the top level of a module.
      kwargs: arguments of the class.
    """
    gymnasium.register(
        env_id,
        ENTRY_POINT,
        max_episode_steps=max_episode_steps(kind),
        kwargs={KEY: f"{kind.__module__}:{kind.__name__}", **kwargs},
    )


def registered(env_id: str, kwargs: Mapping[str, Any]) -> tuple[FuncEnv | None, EnvSpec]:
    """Returns the functional environment of a registered id (None if it is not functional), and the id's specification.

    Args:
      env_id: id in gymnasium's registry, or `module:ID`.
      kwargs: arguments of the class; they take precedence over arguments in the registry.
    """
    spec = gymnasium.spec(env_id.rpartition(":")[2])
    if spec.entry_point != ENTRY_POINT:
        return None, spec
    arguments = {**spec.kwargs, **kwargs}
    functional = named_class(spec.kwargs[KEY])(**{name: arguments[name] for name in arguments if name != KEY})
    return functional, dataclasses.replace(spec, max_episode_steps=max_episode_steps(functional), kwargs=arguments)


def named_class(where: str) -> Callable[..., FuncEnv]:
    """Returns the class at `module:Name`."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
