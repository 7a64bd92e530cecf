"""Environments of ManiSkill, whose GPU simulation uses torch tensors."""

from collections.abc import Mapping
from typing import Any

import gin
import gymnasium
import torch

from alfish.environments.simulator import Simulator, SimulatorStep
from alfish.nest import Nest
from alfish.parameters import PositiveInt, checked
from alfish.simulators.libraries import check_task, library

COMMAND = "pip install mani_skill"


@gin.configurable(module="alfish.simulators")
class ManiSkill(Simulator):
    """B environments of a task of ManiSkill. The log has means over the ended episodes, such as success and return.

    Args:
      task: id of the task, such as 'PushCube-v1'.
      num_envs: number of environments, B.
      options: arguments of `gymnasium.make`, such as {'obs_mode': 'state', 'sim_backend': 'physx_cuda'}.
      ignore_terminations: whether only the time limit ends episodes, not success.

    Raises:
      UsageError: ManiSkill is not installed, or has no such task.
    """

    @checked
    def __init__(
        self,
        task: str = gin.REQUIRED,
        num_envs: PositiveInt = 1,
        options: Mapping[str, Any] | None = None,
        ignore_terminations: bool = False,
    ):
        library("mani_skill.envs", COMMAND)  # registers the tasks
        vector = library("mani_skill.vector.wrappers.gymnasium", COMMAND)
        check_task(task, gymnasium.registry, "ManiSkill")
        env = gymnasium.make(task, num_envs=num_envs, **(options or {}))
        self._env = vector.ManiSkillVectorEnv(env, ignore_terminations=ignore_terminations, record_metrics=True)
        self.num_envs, self.device = num_envs, torch.device(self._env.device)
        self.observation_space = self._env.single_observation_space
        self.action_space = self._env.single_action_space

    def reset(self, seed: int | None) -> Nest:
        return self._env.reset(seed=seed)[0]

    def step(self, action: Nest) -> SimulatorStep:
        observation, reward, terminated, truncated, infos = self._env.step(action)
        # ManiSkill uses the keys of gymnasium before 1.0. The keys exist only if an episode has ended.
        final, info = (infos.pop(key, None) for key in ("final_observation", "final_info"))
        log = None if info is None else _means(info.get("episode") or {}, terminated | truncated)
        return SimulatorStep(observation, reward, terminated, truncated, final, log)

    def close(self) -> None:
        self._env.close()


def _means(episode: Mapping[str, torch.Tensor], ended: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the means of values `[B]` over the ended episodes, as 0-d tensors."""
    weight = ended.float() / ended.sum()
    return {name: (value.float().reshape(len(ended)) * weight).sum() for name, value in episode.items()}
