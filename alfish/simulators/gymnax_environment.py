"""Environments of gymnax."""

from collections.abc import Mapping
from typing import Any

import gin
from gymnasium import spaces

from alfish.errors import UsageError
from alfish.parameters import NonNegativeInt, PositiveInt, checked
from alfish.simulators.jax_environment import JaxEnvironment, Transition, imported
from alfish.simulators.libraries import check_task

COMMAND = "pip install 'alfish[gymnax]'"


@gin.configurable(module="alfish.simulators")
class GymnaxEnvironment(JaxEnvironment):
    """B environments of gymnax, also selected by `make_environment.env_id = 'gymnax:CartPole-v1'`.

    Args:
      task: gymnax's name of the environment, such as 'CartPole-v1'.
      num_envs: number of environments, B.
      seed: seed of the random keys.
      device: device of the environments and of the tensors; None means the CPU.
      options: arguments of `gymnax.make`, such as {'size': 20} of 'DeepSea-bsuite'.
      params: changes of the environment's `EnvParams`, such as {'max_steps_in_episode': 200}.

    Raises:
      UsageError: gymnax is not installed or older than 1.0, or has no such environment or parameter.
    """

    @checked
    def __init__(
        self,
        task: str = gin.REQUIRED,
        num_envs: PositiveInt = 1,
        seed: NonNegativeInt = 0,
        device: str | None = None,
        options: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
    ):
        gymnax = imported("gymnax", COMMAND)
        check_task(task, gymnax.registered_envs, "gymnax")
        self._env, defaults = gymnax.make(task, **(options or {}))
        if not hasattr(self._env, "is_truncated"):
            raise UsageError(
                "this version of gymnax does not distinguish time limits from terminations: pip install 'gymnax>=1.0.1'"
            )
        if unknown := set(params or ()) - set(vars(defaults)):
            raise UsageError(f"gymnax's {task} has no parameter {min(unknown)!r}; it has {', '.join(vars(defaults))}")
        self._params = defaults.replace(**(params or {}))
        space_of = imported("gymnax.environments.spaces", COMMAND).gymnax_space_to_gym_space
        observed, acted = (space_of(one(self._params)) for one in (self._env.observation_space, self._env.action_space))
        jax = imported("jax", COMMAND)
        returned, _ = jax.eval_shape(self._env.reset_env, jax.random.PRNGKey(0), self._params)
        super().__init__(num_envs, _with_dtypes(observed, returned), acted, seed, device)

    def begin(self, key: Any) -> tuple[Any, Any]:
        observation, state = self._env.reset_env(key, self._params)
        return state, observation

    def advance(self, key: Any, state: Any, action: Any) -> Transition:
        observation, state, reward, terminated, _ = self._env.step_env(key, state, action, self._params)
        return Transition(state, observation, reward, terminated, self._env.is_truncated(state, self._params))


def _with_dtypes(space: spaces.Space, returned: Any) -> spaces.Space:
    """Returns a space with the dtypes of the returned observations; some of gymnax's environments declare others."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _with_dtypes(own, returned[key]) for key, own in space.spaces.items()})
    if isinstance(space, spaces.Box) and space.dtype != returned.dtype:
        return spaces.Box(space.low.astype(returned.dtype), space.high.astype(returned.dtype), dtype=returned.dtype)
    return space
