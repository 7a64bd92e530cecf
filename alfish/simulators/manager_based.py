"""Base class of the adapters of Isaac Lab and mjlab: groups of observations, counters and logs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces

from alfish.environments.simulator import Simulator, SimulatorStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.simulators.libraries import as_space


class ManagerBased(Simulator):
    """Environments of Isaac Lab or mjlab.

    Args:
      env: environment, with or without gymnasium's wrappers.
      groups: names of the groups of observations to keep; None means all.

    Attributes:
      env: the environment.

    Raises:
      UsageError: the environment has no such group.
    """

    def __init__(self, env: Any, groups: Sequence[str] | None):
        self.env, self._unwrapped = env, env.unwrapped  # wrappers do not forward attributes
        self.num_envs, self.device = self._unwrapped.num_envs, torch.device(self._unwrapped.device)
        self.observation_space = as_space(self._unwrapped.single_observation_space)
        self.action_space = as_space(self._unwrapped.single_action_space)
        if groups is not None:
            known = self.observation_space.spaces if isinstance(self.observation_space, spaces.Dict) else {}
            if missing := [group for group in groups if group not in known]:
                raise UsageError(
                    f"{type(self).__name__}.groups has {missing[0]!r}, but the task's groups of observations are "
                    f"{', '.join(known)}"
                )
            self.observation_space = spaces.Dict({group: known[group] for group in groups})

    def reset(self, seed: int | None) -> Nest:
        observation, extras = self.env.reset(seed=seed)
        extras.pop("log", None)  # removes the reset's log, because the next step might not overwrite it
        return observation

    def spread_first_episodes(self) -> None:
        length = self._unwrapped.episode_length_buf
        self._unwrapped.episode_length_buf = torch.randint_like(length, high=int(self._unwrapped.max_episode_length))

    def state_dict(self) -> dict[str, Any]:
        """Returns the counter of the curriculum; physics and random generators are not saved."""
        return {"common_step_counter": int(self._unwrapped.common_step_counter)}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self._unwrapped.common_step_counter = state["common_step_counter"]
        return False

    def close(self) -> None:
        self.env.close()

    def _stepped(
        self,
        observation: Nest,
        reward: torch.Tensor,
        terminated: torch.Tensor,
        truncated: torch.Tensor,
        final: Nest,
        log: Mapping[str, Any] | None,
    ) -> SimulatorStep:
        """Returns the result of a step; for a task with a finite horizon, the time limit is a termination."""
        if getattr(self._unwrapped.cfg, "is_finite_horizon", False):
            terminated = terminated | truncated
        return SimulatorStep(observation, reward, terminated, truncated, final, log or None)
