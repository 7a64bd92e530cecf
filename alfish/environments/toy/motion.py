"""Environments with moving objects: one with image observations, and one computed in torch."""

from typing import Any, Literal

import gin
import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from alfish.parameters import PositiveInt, checked


@gin.configurable(module="alfish.environments.toy")
@checked
class Catch(gymnasium.Env):
    """A ball falls down a random column of a board, one row per step; a paddle at the bottom must catch it.

    The actions move the paddle left, not at all, or right. The observation is the image of the board. When the ball
    reaches the bottom row, the episode ends, with reward 1 if the paddle is below the ball, else -1.

    Args:
      rows, columns: numbers of rows and columns of the board.
      scale: size of a field in pixels; with 8, a board of 10 x 5 fields has 80 x 40 pixels.
      mirrored: whether left and right are exchanged.

    Source: Osband et al., 2020, bsuite, section A.3.
    """

    def __init__(
        self, rows: PositiveInt = 10, columns: PositiveInt = 5, scale: PositiveInt = 1, mirrored: bool = False
    ):
        self.observation_space = spaces.Box(0, 255, (rows * scale, columns * scale, 1), np.uint8)
        self.action_space = spaces.Discrete(3)
        self._rows, self._columns, self._scale = rows, columns, scale
        self._directions = (1, 0, -1) if mirrored else (-1, 0, 1)
        self._row = self._ball = self._paddle = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._row, self._ball = 0, int(self.np_random.integers(self._columns))
        self._paddle = self._columns // 2
        return self._image(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._row += 1
        self._paddle = min(max(self._paddle + self._directions[int(action)], 0), self._columns - 1)
        has_ended = self._row == self._rows - 1
        reward = (1.0 if self._paddle == self._ball else -1.0) if has_ended else 0.0
        return self._image(), reward, has_ended, False, {}

    def _image(self) -> np.ndarray:
        board = np.zeros((self._rows, self._columns), np.uint8)
        board[self._row, self._ball] = board[-1, self._paddle] = 255
        return np.kron(board, np.ones((self._scale, self._scale), np.uint8))[..., None]


@gin.configurable(module="alfish.environments.toy")
@checked
class TensorPointMass(VectorEnv):
    """A point on a line, stepped in torch for all environments at once. The state can be saved and restored.

    The action is a push in [-1, 1], which moves the point by half its value, and the reward is -|position|. The average
    return is about -0.5 `length` without pushes, and at best about -0.125.

    Args:
      num_envs: number of environments, B.
      length: number of actions after which an episode is truncated.
      device: device of all tensors.
      autoreset: mode of resets, 'next_step' or 'same_step'.
    """

    def __init__(
        self,
        num_envs: PositiveInt,
        length: PositiveInt = 20,
        device: str = "cpu",
        autoreset: Literal["next_step", "same_step"] = "next_step",
    ):
        mode = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}[autoreset]
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._length = length
        self.single_observation_space = spaces.Box(-2, 2, (2,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self._generator = torch.Generator(device=self.device)
        self._position = torch.zeros(num_envs, device=self.device)
        self._elapsed = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[torch.Tensor, dict]:
        if seed is not None:
            self._generator.manual_seed(seed)
        self._position = self._start()
        self._elapsed = torch.zeros_like(self._elapsed)
        return self._observation(), {}

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict]:
        same_step = self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        restart = self._elapsed >= self._length  # always False in SAME_STEP
        moved = (self._position + 0.5 * action[:, 0]).clamp(-2, 2)
        self._position = torch.where(restart, self._start(), moved)
        self._elapsed = torch.where(restart, 0, self._elapsed + 1)
        reward = torch.where(restart, 0, -self._position.abs())
        truncated = self._elapsed >= self._length
        infos = {}
        if same_step:
            infos["final_obs"] = self._observation()
            self._position = torch.where(truncated, self._start(), self._position)
            self._elapsed = torch.where(truncated, 0, self._elapsed)
        return self._observation(), reward, torch.zeros_like(truncated), truncated, infos

    def get_state(self) -> dict[str, torch.Tensor]:
        state = {"position": self._position, "elapsed": self._elapsed, "generator": self._generator.get_state()}
        return {name: tensor.clone() for name, tensor in state.items()}

    def set_state(self, state: dict[str, torch.Tensor]) -> None:
        self._position = state["position"].to(self.device)
        self._elapsed = state["elapsed"].to(self.device)
        self._generator.set_state(state["generator"].cpu())

    def close(self, **kwargs: Any) -> None:
        pass

    def _start(self) -> torch.Tensor:
        return torch.rand(self.num_envs, generator=self._generator, device=self.device) * 2 - 1

    def _observation(self) -> torch.Tensor:
        return torch.stack([self._position, self._elapsed / self._length], -1)
