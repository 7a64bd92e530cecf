"""Environments of brax, and of MuJoCo Playground, which has brax's interface."""

from collections.abc import Mapping
from typing import Any

import gin
import numpy as np
from gymnasium import spaces

from alfish.errors import UsageError
from alfish.parameters import NonNegativeInt, PositiveInt, checked
from alfish.simulators.jax_environment import COMMAND as JAX
from alfish.simulators.jax_environment import JaxEnvironment, Transition, imported
from alfish.simulators.libraries import check_task


class BraxInterface(JaxEnvironment):
    """B environments with brax's interface: `reset(key)` and `step(state, action)` return a state with all results.

    Each episode begins with a new reset, whereas the packages' own wrappers return to the state of the first reset.

    Args:
      env: environment without wrappers, whose actions are in [-1, 1].
      num_envs, seed, device, time_limit: see `JaxEnvironment`.
    """

    def __init__(self, env: Any, num_envs: int, seed: int, device: str | None, time_limit: int):
        self._env, jax = env, imported("jax", JAX)
        observed = jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs
        space = jax.tree.map(lambda leaf: spaces.Box(-np.inf, np.inf, leaf.shape, leaf.dtype), observed)
        space = spaces.Dict(dict(space)) if isinstance(space, Mapping) else space
        super().__init__(num_envs, space, spaces.Box(-1.0, 1.0, (env.action_size,)), seed, device, time_limit)

    def begin(self, key: Any) -> tuple[Any, Any]:
        state = self._env.reset(key)
        return state, state.obs

    def advance(self, key: Any, state: Any, action: Any) -> Transition:
        state = self._env.step(state, action)
        return Transition(state, state.obs, state.reward, state.done)


@gin.configurable(module="alfish.simulators")
class BraxEnvironment(BraxInterface):
    """B environments of brax, also selected by `make_environment.env_id = 'brax:ant'`.

    Args:
      task: brax's name of the environment, such as 'ant'.
      num_envs: number of environments, B.
      seed: seed of the random keys.
      device: device of the environments and of the tensors; None means the CPU.
      time_limit: number of steps after which an episode is truncated.
      options: arguments of the environment's class, such as {'backend': 'spring'}; None means no arguments.

    Raises:
      UsageError: brax is not installed, or has no such environment.
    """

    @checked
    def __init__(
        self,
        task: str = gin.REQUIRED,
        num_envs: PositiveInt = 1,
        seed: NonNegativeInt = 0,
        device: str | None = None,
        time_limit: PositiveInt = 1000,
        options: Mapping[str, Any] | None = None,
    ):
        envs = imported("brax.envs", "pip install 'alfish[brax]'")
        try:
            env = envs.get_environment(task, **(options or {}))
        except KeyError as error:
            if error.args != (task,):
                raise
            raise UsageError(f"brax has no task {task!r}; it has for example 'ant' and 'halfcheetah'") from None
        super().__init__(env, num_envs, seed, device, time_limit)


@gin.configurable(module="alfish.simulators")
class PlaygroundEnvironment(BraxInterface):
    """B environments of MuJoCo Playground, also selected by `env_id = 'mujoco_playground:CartpoleBalance'`.

    Args:
      task: Playground's name of the environment, such as 'CartpoleBalance'.
      num_envs: number of environments, B.
      seed: seed of the random keys.
      device: device of the environments and of the tensors; None means the CPU.
      config: changes of the environment's configuration, such as {'impl': 'jax'}; None means no changes. The
        configuration's `episode_length` is the number of steps after which an episode is truncated.

    Raises:
      UsageError: Playground is not installed, or has no such environment.
    """

    @checked
    def __init__(
        self,
        task: str = gin.REQUIRED,
        num_envs: PositiveInt = 1,
        seed: NonNegativeInt = 0,
        device: str | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        registry = imported("mujoco_playground", "pip install 'alfish[playground]'").registry
        check_task(task, registry.ALL_ENVS, "Playground")
        changes = dict(config or {})
        limit = {**registry.get_default_config(task), **changes}["episode_length"]
        super().__init__(registry.load(task, config_overrides=changes), num_envs, seed, device, limit)
