"""Converts vector environments of torch tensors to the stream of time steps."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from alfish import nest
from alfish.data import StepType, TimeStep
from alfish.environments.objectives import declared
from alfish.environments.sequential import close
from alfish.environments.simulator import Simulator, SimulatorEnvironment, SimulatorStep
from alfish.environments.vector import autoreset_mode
from alfish.errors import UsageError
from alfish.nest import Nest


class TensorEnvironment(SimulatorEnvironment):
    """A `gymnasium.vector.VectorEnv` whose observations, rewards and flags are torch tensors `[B, ...]`.

    In the mode NEXT_STEP, the environment must not modify returned tensors, because they are not copied. In the mode
    SAME_STEP, it may modify them. Unless `final_observation` is set, each step that truncates an episode must then
    return a batch of observations `infos['final_obs']`, of which only the entries of ended episodes are read.

    Args:
      env: environment with `metadata['autoreset_mode']` and a `device`.
      seed, action_mask, rewards, final_observation: parameters of `SimulatorEnvironment`.
    """

    _state_method = "get_state"

    def __init__(
        self,
        env: VectorEnv,
        seed: int,
        action_mask: str | None = None,
        rewards: Sequence[str] | None = None,
        final_observation: Literal["given", "drop", "before"] = "given",
    ):
        mode = autoreset_mode(env)
        if mode == AutoresetMode.DISABLED:
            raise UsageError(
                f"{type(env).__name__} returns tensors and disables autoreset; set its autoreset mode to NEXT_STEP"
            )
        super().__init__(_VectorSimulator(env), seed, action_mask, rewards, final_observation)
        self.env = env
        self.name = type(env).__name__
        self.uneven = mode == AutoresetMode.SAME_STEP
        self._was_done = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        self._was_done = torch.zeros_like(self._was_done)
        return super().reset(seeds, rows)

    def state_dict(self) -> dict[str, Any]:
        """Returns the environment's state if it has a method `get_state`, else an empty dict."""
        state = super().state_dict()
        return state and {**state, "was_done": self._was_done}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        continues = super().load_state_dict(state)
        self._was_done = state["was_done"].to(self.device) if continues else torch.zeros_like(self._was_done)
        return continues

    def _rows(self, step: SimulatorStep, executed: Nest) -> TimeStep:
        if self.uneven:
            return super()._rows(step, executed)
        first, self._was_done = self._was_done, step.terminated | step.truncated
        last_or_mid = torch.where(self._was_done, StepType.LAST, StepType.MID)
        return TimeStep(
            step_type=torch.where(first, StepType.FIRST, last_or_mid).to(torch.int32),
            reward=_zero_where(first, step.reward),
            discount=(~step.terminated | first).to(torch.float32),
            observation=self._observed.from_environment(step.observation),
            prev_action=nest.map(lambda leaf: _zero_where(first, leaf), executed),
            env_id=self.env_id,
        )


class _VectorSimulator(Simulator):
    """A vector environment of tensors as a simulator."""

    def __init__(self, env: VectorEnv):
        self._env: Any = env
        self.num_envs, self.device = env.num_envs, torch.device(getattr(env, "device", "cpu"))
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.reward_space = declared(env)

    def reset(self, seed: int | None) -> Nest:
        return self._env.reset(seed=seed)[0]

    def step(self, action: Nest) -> SimulatorStep:
        observation, reward, terminated, truncated, infos = self._env.step(action)
        final = infos.pop("final_obs", None)  # removed from the infos, because it would be stale in the next step
        return SimulatorStep(observation, reward, terminated, truncated, final, infos)

    def state_dict(self) -> Any:
        return self._env.get_state() if hasattr(self._env, "get_state") else {}

    def load_state_dict(self, state: Any) -> bool:
        if not hasattr(self._env, "set_state"):
            return False
        self._env.set_state(state)
        return True

    def close(self) -> None:
        close(self._env)


def _zero_where(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return values.masked_fill(nest.widened(rows, values), 0)
