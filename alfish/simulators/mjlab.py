"""Environments of mjlab, which simulates with MuJoCo Warp."""

from collections.abc import Mapping, Sequence
from typing import Any

import gin
import torch

from alfish import nest
from alfish.environments.simulator import SimulatorStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.parameters import NonNegativeInt, PositiveInt, checked
from alfish.parameters.kinds import device_named
from alfish.simulators.libraries import check_task, library, set_up
from alfish.simulators.manager_based import ManagerBased

COMMAND = "pip install 'mjlab>=1.6'"


@gin.configurable(module="alfish.simulators")
class Mjlab(ManagerBased):
    """B environments of a task of mjlab, with their true final observations.

    With `auto_reset` False, mjlab does not reset by itself, so a step returns final observations. This class then
    resets the environments whose episodes ended. mjlab needs their indices, so the host waits for the device once per
    step.

    Args:
      task: name of the task, such as 'Mjlab-Velocity-Flat-Unitree-G1'.
      num_envs: number of environments, B.
      seed: seed in the task's configuration; None means no seed.
      device: device of the simulation; None means a GPU if there is one.
      cfg: changes of the task's configuration by path, such as {'episode_length_s': 20.0}.
      groups: names of the groups of observations to keep, such as ['actor', 'critic']; None means all.

    Raises:
      UsageError: mjlab is not installed or too old, or has no such task, group or part of the configuration.
    """

    @checked
    def __init__(
        self,
        task: str = gin.REQUIRED,
        num_envs: PositiveInt = 1,
        seed: NonNegativeInt | None = None,
        device: str | None = None,
        cfg: Mapping[str, Any] | None = None,
        groups: Sequence[str] | None = None,
    ):
        envs, registry = (library(f"mjlab.{name}", COMMAND) for name in ("envs", "tasks.registry"))
        library("mjlab.tasks", COMMAND)  # registers the tasks
        check_task(task, registry.list_tasks(), "mjlab")
        config = registry.load_env_cfg(task)
        if not hasattr(config, "auto_reset"):
            raise UsageError(f"this version of mjlab returns no final observations; install a newer version: {COMMAND}")
        config.scene.num_envs, config.seed, config.auto_reset = num_envs, seed, False
        set_up(config, cfg, "Mjlab.cfg")
        on = str(device_named(device or "auto", "Mjlab.device"))
        super().__init__(envs.ManagerBasedRlEnv(cfg=config, device=on), groups)

    def step(self, action: Nest) -> SimulatorStep:
        observation, reward, terminated, truncated, extras = self.env.step(action)
        ended = terminated | truncated
        indices = ended.nonzero().squeeze(-1)
        if not len(indices):
            return self._stepped(observation, reward, terminated, truncated, None, extras.pop("log", None))
        # The reset overwrites the tensors that the step returned.
        results = nest.map(torch.clone, (observation, reward, terminated, truncated))
        final, reward, terminated, truncated = results
        begun, extras = self.env.reset(env_ids=indices)
        # The reset also returns observations of the other environments, with new noise, which are not used.
        after = nest.where(ended, begun, final)
        return self._stepped(after, reward, terminated, truncated, final, extras.pop("log", None))
