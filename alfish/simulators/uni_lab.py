"""Environments of UniLab, which simulates on the CPU with MuJoCo and other engines."""

from collections.abc import Mapping
from typing import Any

import gin
import torch
from gymnasium import spaces

from alfish.environments.simulator import Simulator, SimulatorStep
from alfish.nest import Nest
from alfish.parameters import PositiveInt, checked
from alfish.simulators.libraries import as_space, check_task, library, unbounded

COMMAND = "pip install unilab"


@gin.configurable(module="alfish.simulators")
class UniLab(Simulator):
    """B environments of a task of UniLab.

    Args:
      task: name of the task in UniLab's registry.
      num_envs: number of environments, B.
      engine: name of the engine, such as 'mujoco'; None means the first one that the task has.
      cfg: changes of the task's configuration, in UniLab's form.

    Raises:
      UsageError: UniLab is not installed, or has no such task.
    """

    @checked
    def __init__(
        self,
        task: str = gin.REQUIRED,
        num_envs: PositiveInt = 1,
        engine: str | None = None,
        cfg: Mapping[str, Any] | None = None,
    ):
        registry = library("unilab.base.registry", COMMAND)
        registry.ensure_registries()
        check_task(task, registry.list_registered_envs(), "UniLab")
        self._env = registry.make(task, sim_backend=engine, env_cfg_override=cfg and dict(cfg), num_envs=num_envs)
        self.num_envs, self.device = num_envs, torch.device(self._env.device)
        groups: dict[str, spaces.Space] = {name: unbounded((size,)) for name, size in self._env.obs_groups_spec.items()}
        self.observation_space, self.action_space = spaces.Dict(groups), as_space(self._env.action_space)

    def reset(self, seed: int | None) -> Nest:
        if self._env.state is None:
            self._env.init_state()
        return self._env.reset(None, seed=seed)[0]

    def step(self, action: Nest) -> SimulatorStep:
        state = self._env.step(action)
        log = state.info.pop("log", None)
        return SimulatorStep(
            state.obs, state.reward, state.terminated, state.truncated, state.final_observation, log or None
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the counter of steps; physics and random generators are not saved."""
        return dict(self._env.export_training_state())

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self._env.import_training_state(state)
        return False

    def close(self) -> None:
        self._env.close()
