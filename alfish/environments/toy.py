"""Small environments with known best returns, for testing an algorithm in seconds.

Each class is a `gymnasium.Env` or a `VectorEnv`. Use them as in `make_environment.env_id = @Corridor`. Some need
exploration or a memory, one has action masks, one has images, and one is computed in torch.
"""

from typing import Annotated, Any, Literal

import gin
import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from alfish.errors import UsageError
from alfish.parameters import NonNegativeInt, PositiveInt, Range, checked


@gin.configurable(module="alfish.environments.toy")
@checked
class Corridor(gymnasium.Env):
    """A row of rooms with reward 1 in the last room, which random actions almost never reach.

    In each room, one action leads to the next room, and the other actions lead back to the previous room. The correct
    action differs between rooms, but not between episodes. The observation is the room's one-hot code. The best return
    is 1; a policy that does not explore earns 0.

    Args:
      num_rooms: number of rooms; an episode ends in the last room.
      num_actions: number of actions in each room.
      length: number of actions after which an episode is truncated; None means 3 num_rooms.
    """

    def __init__(
        self,
        num_rooms: Annotated[int, Range(2)] = 20,
        num_actions: Annotated[int, Range(2)] = 4,
        length: PositiveInt | None = None,
    ):
        self.observation_space = spaces.Box(0, 1, (num_rooms,), np.float32)
        self.action_space = spaces.Discrete(num_actions)
        self._onward = np.random.default_rng(num_rooms).integers(num_actions, size=num_rooms)
        self._length = 3 * num_rooms if length is None else length
        self._step, self._room = 0, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step, self._room = 0, 0
        return self._observation(), {"room": 0}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        self._room = self._room + 1 if action == self._onward[self._room] else max(self._room - 1, 0)
        ends = self._room == len(self._onward) - 1
        return self._observation(), float(ends), ends, self._step >= self._length and not ends, {"room": self._room}

    def _observation(self) -> np.ndarray:
        observation = np.zeros(len(self._onward), np.float32)
        observation[self._room] = 1
        return observation


@gin.configurable(module="alfish.environments.toy")
@checked
class Recall(gymnasium.Env):
    """A memory task: the first observation shows a cue, and `delay` steps later the matching action has reward 1.

    The first observation contains the one-hot code of the cue; later observations contain zeros. The last entry of an
    observation is 1 in the step whose action is rewarded. The best average return without memory is 1 / num_cues, or
    0.5 for two cues and a Box action.

    Args:
      num_cues: number of equally likely cues, and of actions.
      delay: number of actions before the rewarded action; with 0, the cue is visible in the step of this action.
      action: kind of action: 'discrete' is the index of the cue; 'box' is a number in [-1, 1], with cues at equal
        distances. The reward of 'box' is 1 minus half the distance to the cue.
    """

    def __init__(
        self,
        num_cues: Annotated[int, Range(2)] = 4,
        delay: NonNegativeInt = 8,
        action: Literal["discrete", "box"] = "discrete",
    ):
        self.observation_space = spaces.Box(0, 1, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues) if action == "discrete" else spaces.Box(-1, 1, (1,), np.float32)
        self._num_cues = num_cues
        self._delay = delay
        self._step = 0
        self._cue = 0
        self._kind = action

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step, self._cue = 0, int(self.np_random.integers(self._num_cues))
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        counts = self._step == self._delay
        self._step += 1
        if self._kind == "discrete":
            reward = float(action == self._cue)
        else:
            reward = 1 - abs(float(action[0]) - np.linspace(-1, 1, self._num_cues)[self._cue]) / 2
        return self._observation(), counts * reward, counts, False, {}

    def _observation(self) -> np.ndarray:
        observation = np.zeros(self._num_cues + 1, np.float32)
        observation[self._cue] = self._step == 0
        observation[-1] = self._step == self._delay
        return observation


@gin.configurable(module="alfish.environments.toy")
@checked
class HiddenArm(gymnasium.Env):
    """A bandit: one random arm per episode has reward 1, and all other arms have reward 0. The observation is constant.

    The best policy repeats a rewarded action, so it needs the last action and its reward. With two arms, its return is
    `length` - 0.5; without the last action or its reward, the best return is `length` / 2.

    Args:
      num_arms: number of actions.
      length: number of actions after which an episode is truncated.
    """

    def __init__(self, num_arms: Annotated[int, Range(2)] = 2, length: PositiveInt = 8):
        self.observation_space = spaces.Box(1, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(num_arms)
        self._num_arms = num_arms
        self._length = length
        self._step = 0
        self._arm = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step, self._arm = 0, int(self.np_random.integers(self._num_arms))
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        return np.ones(1, np.float32), float(action == self._arm), False, self._step >= self._length, {}


@gin.configurable(module="alfish.environments.toy")
@checked
class MaskedIdentity(gymnasium.Env):
    """The action must equal the observed number; each step forbids a random set of other actions.

    The observed number is uniform. `action_masks()` and the info 'action_mask' return the mask, which always allows the
    right action. The reward is the fraction of the action's entries that are right, so the best return is `length`.
    Uniformly random allowed actions earn length / (num_actions - num_forbidden), or length (1 + num_forbidden /
    num_actions) / 2 with 'multi_binary'.

    Args:
      num_actions: number of actions, n.
      num_forbidden: number of forbidden actions in each step, below n.
      action: kind of action: 'discrete'; 'multi_discrete', two numbers with separate masks; or 'multi_binary', n bits,
        where each bit has only one allowed value with probability num_forbidden / n.
      length: number of actions after which an episode is truncated.

    Source: InvalidActionEnvDiscrete of sb3-contrib, which also draws a new mask at each step.
    """

    def __init__(
        self,
        num_actions: PositiveInt = 80,
        num_forbidden: NonNegativeInt = 60,
        action: Literal["discrete", "multi_discrete", "multi_binary"] = "discrete",
        length: PositiveInt = 100,
    ):
        if num_forbidden >= num_actions:
            raise UsageError(
                f"MaskedIdentity.num_forbidden is {num_forbidden}; it must be less than its number of actions, "
                f"{num_actions}"
            )
        spaces_of = {
            "discrete": spaces.Discrete(num_actions),
            "multi_discrete": spaces.MultiDiscrete([num_actions] * 2),
            "multi_binary": spaces.MultiBinary(num_actions),
        }
        self.observation_space = self.action_space = spaces_of[action]
        self._kind = action
        self._size = num_actions
        self._num_forbidden = num_forbidden
        self._length = length
        self._step = 0
        self._target: Any = None
        self._mask = np.ones(0, np.int8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {"action_mask": self._mask}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self._step += 1
        reward = float(np.mean(np.asarray(action) == self._target))
        return self._observe(), reward, False, self._step >= self._length, {"action_mask": self._mask}

    def action_masks(self) -> np.ndarray:
        return self._mask

    def _observe(self) -> Any:
        if self._kind == "multi_binary":
            self._target = self.np_random.integers(2, size=self._size, dtype=np.int8)
            is_free = self.np_random.random(self._size) * self._size >= self._num_forbidden
            self._mask = np.stack([is_free | (self._target == 0), is_free | (self._target == 1)], -1).reshape(-1)
            return self._target
        targets = self.np_random.integers(self._size, size=1 if self._kind == "discrete" else 2)
        self._mask = np.concatenate([self._allowed(target) for target in targets])
        self._target = targets[0] if self._kind == "discrete" else targets
        return self._target

    def _allowed(self, target: int) -> np.ndarray:
        order = self.np_random.permutation(self._size)
        mask = np.ones(self._size, np.int8)
        mask[order[order != target][: self._num_forbidden]] = 0
        return mask


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
