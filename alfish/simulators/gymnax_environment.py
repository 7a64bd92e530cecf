"""Environments of gymnax."""

from collections.abc import Mapping
from typing import Any

import gin

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
        observed, acted = self._env.observation_space(self._params), self._env.action_space(self._params)
        super().__init__(num_envs, space_of(observed), space_of(acted), seed, device)

    def begin(self, key: Any) -> tuple[Any, Any]:
        observation, state = self._env.reset_env(key, self._params)
        return state, observation

    def advance(self, key: Any, state: Any, action: Any) -> Transition:
        observation, state, reward, terminated, _ = self._env.step_env(key, state, action, self._params)
        return Transition(state, observation, reward, terminated, self._env.is_truncated(state, self._params))
