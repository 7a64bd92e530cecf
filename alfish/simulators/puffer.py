"""PufferLib's environments in C, which write to numpy buffers in place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
import numpy as np
import torch

from alfish import nest
from alfish.environments.simulator import Simulator, SimulatorStep
from alfish.nest import Nest
from alfish.parameters import PositiveInt, checked
from alfish.simulators.libraries import as_space


@gin.configurable(module="alfish.simulators")
class Puffer(Simulator):
    """A `PufferEnv` on the CPU; each of its agents is one environment.

    PufferLib does not return final observations, see `make_environment.final_observation`. Many of its environments
    report a termination at their time limit.

    Args:
      env: class of the environment, or function that makes it; called with `num_envs`.
      num_envs: number of PufferLib's environments; B is the number of their agents.
    """

    device = torch.device("cpu")

    @checked
    def __init__(self, env: Callable[..., Any] = gin.REQUIRED, num_envs: PositiveInt = 1):
        self._env = env(num_envs=num_envs)
        self.num_envs = self._env.num_agents
        self.observation_space = as_space(self._env.single_observation_space)
        self.action_space = as_space(self._env.single_action_space)

    def reset(self, seed: int | None) -> Nest:
        observation, _ = self._env.reset(seed)
        return torch.from_numpy(observation)

    def step(self, action: Nest) -> SimulatorStep:
        *results, infos = self._env.step(nest.arrays(action))
        observation, reward, terminated, truncated = map(torch.from_numpy, results)
        return SimulatorStep(observation, reward, terminated, truncated, None, _means(infos))

    def close(self) -> None:
        self._env.close()


def _means(infos: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Returns the means of the numbers in a list of infos, None without numbers.

    PufferLib's list is empty in most steps.
    """
    numbers: dict[str, list[float]] = {}
    for info in infos:
        for key, value in info.items():
            if isinstance(value, (int, float, np.number)):
                numbers.setdefault(key, []).append(float(value))
    return {key: float(np.mean(values)) for key, values in numbers.items()} or None
