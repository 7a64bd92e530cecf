"""Isaac Lab 2.3 and 3.0. A process can hold only one simulation, and Isaac Sim runs until the process ends."""

from collections.abc import Mapping, Sequence
from typing import Any

import gin
import gymnasium
from absl import logging

from alfish.environments.simulator import SimulatorStep
from alfish.nest import Nest
from alfish.parameters import NonNegativeInt, PositiveInt, checked
from alfish.parameters.kinds import device_named
from alfish.simulators.libraries import check_task, library, set_up
from alfish.simulators.manager_based import ManagerBased

COMMAND = "pip install 'isaaclab[isaacsim]' --extra-index-url https://pypi.nvidia.com"
_LAUNCHED: list[Any] = []  # Isaac Sim's launcher, kept because the process ends when it is garbage-collected


@gin.configurable(module="alfish.simulators")
class IsaacLab(ManagerBased):
    """B environments of a task of Isaac Lab.

    With version 3.0, this class sets `cfg.compute_final_obs`, so that Isaac Lab returns final observations. If a term
    of the observation has a history or a delay, its final value lacks the newest sample, which a warning reports.
    Version 2.3 does not return final observations, see `make_environment.final_observation`.

    Args:
      task: id of the task, such as 'Isaac-Velocity-Flat-G1-v0'; ids of Isaac Lab 3.0 have no '-v0'.
      num_envs: number of environments, B.
      seed: seed in the task's configuration, used by events at startup; None means no seed.
      device: device of the simulation; None means the device in the task's configuration.
      cfg: changes of the task's configuration by path, such as {'episode_length_s': 20.0}.
      groups: names of the groups of observations to keep, such as ['policy', 'critic']; None means all.
      launcher: further arguments of Isaac Lab's launcher, such as {'enable_cameras': True}.

    Raises:
      UsageError: Isaac Lab is not installed, or has no such task, group or part of the configuration.
    """

    only_one = True

    @checked
    def __init__(
        self,
        task: str = gin.REQUIRED,
        num_envs: PositiveInt = 1,
        seed: NonNegativeInt | None = None,
        device: str | None = None,
        cfg: Mapping[str, Any] | None = None,
        groups: Sequence[str] | None = None,
        launcher: Mapping[str, Any] | None = None,
    ):
        on_device = {} if device is None else {"device": str(device_named(device, "IsaacLab.device"))}
        options = {**on_device, **(launcher or {})}
        app = launch_for_tasks(options)
        launches_for_task = hasattr(app, "launch_simulation")
        utilities = library("isaaclab_tasks.utils", COMMAND)
        check_task(task, gymnasium.registry, "Isaac Lab")
        config = utilities.parse_env_cfg(task, num_envs=num_envs, **on_device)
        config.seed = seed
        gives_final = hasattr(config, "compute_final_obs")
        if gives_final:
            config.compute_final_obs = True
        set_up(config, cfg, "IsaacLab.cfg")
        if launches_for_task and not _LAUNCHED:
            _LAUNCHED.append(app.launch_simulation(config, options))
            _LAUNCHED[-1].__enter__()
        if gives_final and (late := _late_terms(config)):
            logging.warning(
                "Isaac Lab computes the final observations of %s without the newest sample, because they have a "
                "history or a delay; truncated episodes therefore bootstrap from observations that are one step old.",
                ", ".join(late),
            )
        super().__init__(gymnasium.make(task, cfg=config), groups)

    def step(self, action: Nest) -> SimulatorStep:
        observation, reward, terminated, truncated, extras = self.env.step(action)
        # Isaac Lab does not remove these keys from its dict, so a later step would return old values.
        final, log = (extras.pop(key, None) for key in ("final_obs", "log"))
        return self._stepped(observation, reward, terminated, truncated, final, log)


def launch_for_tasks(options: Mapping[str, Any] | None = None) -> Any:
    """Imports Isaac Lab's tasks, after starting Isaac Sim for version 2.3; returns the module `isaaclab.app`.

    Args:
      options: arguments of the launcher.

    Raises:
      UsageError: Isaac Lab is not installed.
    """
    app = library("isaaclab.app", COMMAND)
    # Isaac Lab 3.0 has `launch_simulation` and starts Isaac Sim when a task is made.
    if not hasattr(app, "launch_simulation") and not _LAUNCHED:
        _LAUNCHED.append(app.AppLauncher({"headless": True, **(options or {})}))
    library("isaaclab_tasks", COMMAND)
    return app


def _late_terms(config: Any) -> list[str]:
    """Returns the names of the groups and terms of observations that have a history or a delay."""
    # Tasks in the direct workflow have no groups.
    groups = getattr(getattr(config, "observations", None), "__dict__", {})
    terms = {f"{name}.{key}": term for name, group in groups.items() for key, term in vars(group).items()}
    late = "history_length", "delay_max_lag"
    return [name for name, part in {**groups, **terms}.items() if any(getattr(part, key, None) for key in late)]
