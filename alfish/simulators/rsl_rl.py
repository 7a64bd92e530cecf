"""Environments with rsl_rl's interface `VecEnv`, which many robot simulators have."""

from collections.abc import Callable, Mapping
from typing import Any

import gin
import torch
from gymnasium import spaces

from alfish.environments.simulator import Simulator, SimulatorStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.parameters import PositiveInt, checked
from alfish.simulators.libraries import unbounded


@gin.configurable(module="alfish.simulators")
class RslRl(Simulator):
    """B environments of rsl_rl's `VecEnv`, without final observations (see `make_environment.final_observation`).

    `extras['time_outs']` marks truncations; all other ends of episodes are terminations.

    Args:
      env: function that makes the environment, called with `num_envs`.
      num_envs: number of environments, B.
    """

    @checked
    def __init__(self, env: Callable[..., Any] = gin.REQUIRED, num_envs: PositiveInt = 1):
        self._env = env(num_envs=num_envs)
        self.num_envs, self.device = self._env.num_envs, torch.device(self._env.device)
        # In some libraries `get_observations` resets the environments, so it is called only before episodes begin.
        self.observation_space = _space_of(_plain(self._env.get_observations()))
        self.action_space = unbounded((self._env.num_actions,))

    def reset(self, seed: int | None) -> Nest:
        if seed is not None and hasattr(self._env, "seed"):
            self._env.seed(seed)
        return _plain(self._env.reset() if hasattr(self._env, "reset") else self._env.get_observations())

    def step(self, action: Nest) -> SimulatorStep:
        observation, reward, dones, extras = self._env.step(action)
        ended = dones.to(torch.bool)
        time_outs = extras.pop("time_outs", None)  # removed, so that the next step does not read old flags
        truncated = torch.zeros_like(ended) if time_outs is None else ended & time_outs.to(torch.bool)
        log = extras.pop("log", None) or extras.pop("episode", None)
        return SimulatorStep(_plain(observation), reward, ended & ~truncated, truncated, None, log)

    def spread_first_episodes(self) -> None:
        length = getattr(self._env, "episode_length_buf", None)
        if length is not None:
            times = torch.rand(self.num_envs, device=length.device) * self._env.max_episode_length
            self._env.episode_length_buf = times.to(length.dtype)

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()


def _plain(observation: Any) -> Nest:
    """Returns an observation as nested dicts, without the extras of a pair (observation, extras)."""
    if isinstance(observation, tuple):
        observation = observation[0]
    if isinstance(observation, torch.Tensor):
        return observation
    if not hasattr(observation, "keys"):
        raise UsageError(
            f"the environment returned an observation of type {type(observation).__name__}; environments of rsl_rl "
            "return a tensor, or a mapping of tensors"
        )
    return {key: _plain(observation[key]) for key in observation.keys()}  # noqa: SIM118 - iterates over rows


def _space_of(observation: Nest) -> spaces.Space:
    if isinstance(observation, Mapping):
        return spaces.Dict({key: _space_of(part) for key, part in observation.items()})
    return unbounded(observation.shape[1:], torch.empty(0, dtype=observation.dtype).numpy().dtype.type)
