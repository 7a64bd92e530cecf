"""Small environments with known best returns, for tests and for trying a new algorithm in seconds.

All are `gymnasium.Env`s or vector environments. Build them with `make_environment.env_id = @Bandit` and the like.
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
class Stamped(gymnasium.Env):
    """Observations are (env, episode, step), which reveal each row that was lost, doubled or shifted.

    Step k of an episode has reward k. The env stamp is drawn from the seed; episodes count from 0.

    Args:
      lengths: numbers of actions of the episodes, taken in turn.
      truncates: True: episodes end by truncation; False: by termination.
    """

    def __init__(self, lengths: tuple[PositiveInt, ...] = (3, 5, 1, 8), truncates: bool = False):
        self.observation_space = spaces.Box(0, 2**31, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._lengths, self._truncates = lengths, truncates
        self._stamp, self._episode, self._step = -1, -1, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self._stamp < 0:
            self._stamp = int(self.np_random.integers(1 << 20))
        self._episode, self._step = self._episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        ends = self._step >= self._lengths[self._episode % len(self._lengths)]
        info = {"episode": self._episode, "note": "text"}
        return self._observation(), float(self._step), ends and not self._truncates, ends and self._truncates, info

    def _observation(self) -> np.ndarray:
        return np.array([self._stamp, self._episode, self._step], np.float32)


@gin.configurable(module="alfish.environments.toy")
@checked
class OneState(gymnasium.Env):
    """One state with reward 1 per step, truncated after `length` actions. Its value is 1 / (1 - gamma)."""

    def __init__(self, length: PositiveInt = 7):
        self.observation_space = spaces.Box(1, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._length, self._step = length, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step = 0
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        return np.ones(1, np.float32), 1.0, False, self._step >= self._length, {}


@gin.configurable(module="alfish.environments.toy")
@checked
class Bandit(gymnasium.Env):
    """The action must match the observation: reward 1 - |action - target| / scale. The best return is `length`.

    Args:
      action: 'discrete' (4 arms), 'box' (a number in [-2, 6]), 'multi_discrete' or 'multi_binary'.
      length: actions per episode.
    """

    def __init__(
        self, action: Literal["discrete", "box", "multi_discrete", "multi_binary"] = "discrete", length: PositiveInt = 4
    ):
        spaces_of = {
            "discrete": spaces.Discrete(4, start=-1),
            "box": spaces.Box(-2, 6, (1,), np.float32),
            "multi_discrete": spaces.MultiDiscrete([4, 4]),
            "multi_binary": spaces.MultiBinary(2),
        }
        self.action_space = spaces_of[action]
        self.observation_space = spaces.Box(0, 1, (4,), np.float32)
        self._kind, self._length, self._step, self._target = action, length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        target = self._target
        if self._kind == "discrete":
            reward = float(action + 1 == target)
        elif self._kind == "box":
            reward = 1 - abs(float(np.asarray(action).reshape(-1)[0]) - target) / 4
        elif self._kind == "multi_discrete":
            reward = float(np.mean(np.asarray(action) == [target, 3 - target]))
        else:
            reward = float(np.mean(np.asarray(action) == [target // 2, target % 2]))
        return self._observe(), reward, self._step >= self._length, False, {}

    def _observe(self) -> np.ndarray:
        self._target = int(self.np_random.integers(4))
        return np.eye(4, dtype=np.float32)[self._target]


@gin.configurable(module="alfish.environments.toy")
@checked
class NestedBandit(gymnasium.Env):
    """A bandit with the observation Dict(image, vector, Discrete). The best return is `length`.

    The image is bright in its left or right half. Each part of the action must match one part of the observation.

    Args:
      nested_action: the action is a Dict of a Discrete, a Tuple of a Box and a MultiBinary, instead of a MultiDiscrete.
      image_size: height and width of the image.
      length: actions per episode.
    """

    def __init__(self, nested_action: bool = False, image_size: PositiveInt = 36, length: PositiveInt = 4):
        self.observation_space = spaces.Dict(
            image=spaces.Box(0, 255, (image_size, image_size, 1), np.uint8),
            vector=spaces.Box(-1, 1, (2,), np.float64),
            digit=spaces.Discrete(3, start=2),
        )
        parts = spaces.Tuple([spaces.Box(-3, 1, (2,), np.float32), spaces.MultiBinary(2)])
        nested = spaces.Dict(choice=spaces.Discrete(3, start=1), parts=parts)
        self.action_space = nested if nested_action else spaces.MultiDiscrete([2, 2, 3])
        self._nested, self._size, self._length = nested_action, image_size, length
        self._step, self._hidden = 0, (0, 0, 0)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        self._step += 1
        side, sign, digit = self._hidden
        if self._nested:
            right = [
                float(action["choice"] - 1 == digit),
                1 - abs(float(action["parts"][0][0]) - (2 * sign - 2)) / 4,  # -2 or 0
                float(action["parts"][1][0] == side),
            ]
        else:
            right = [float(a == b) for a, b in zip(action, self._hidden)]
        return self._observe(), float(np.mean(right)), self._step >= self._length, False, {}

    def _observe(self) -> dict:
        side, sign, digit = (int(self.np_random.integers(n)) for n in (2, 2, 3))
        self._hidden = side, sign, digit
        image = np.zeros((self._size, self._size, 1), np.uint8)
        half = self._size // 2
        image[:, half * side : half * (side + 1)] = 255
        return {"image": image, "vector": np.array([2 * sign - 1, 0.0]), "digit": np.int64(digit + 2)}


@gin.configurable(module="alfish.environments.toy")
@checked
class Recall(gymnasium.Env):
    """A memory task: the first observation shows a cue, and `delay` steps later the matching action has reward 1.

    The first observation has the cue's one-hot code, later ones zeros; the last entry is 1 where the action counts. The
    best average return without memory is 1 / num_cues; 0.5 for two cues and a Box action.

    Args:
      num_cues: number of cues, equally likely, and of actions.
      delay: number of actions before the one that counts; 0: the cue is still visible then.
      action: 'discrete', the cue; 'box', a number in [-1, 1], in which cues have equal distances. The reward is then 1
        minus half the distance to the cue.
    """

    def __init__(
        self,
        num_cues: Annotated[int, Range(2)] = 4,
        delay: NonNegativeInt = 8,
        action: Literal["discrete", "box"] = "discrete",
    ):
        self.observation_space = spaces.Box(0, 1, (num_cues + 1,), np.float32)
        self.action_space = spaces.Discrete(num_cues) if action == "discrete" else spaces.Box(-1, 1, (1,), np.float32)
        self._num_cues, self._delay, self._step, self._cue, self._kind = num_cues, delay, 0, 0, action

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
    """One arm has reward 1 throughout an episode, drawn uniformly, and the others 0; the observation never changes.

    Only the last action and its reward tell what to do: to repeat what was rewarded. With two arms the best return is
    `length` - 0.5, without either of the two it is `length` / 2.

    Args:
      num_arms: number of actions.
      length: actions per episode, which is then truncated.
    """

    def __init__(self, num_arms: Annotated[int, Range(2)] = 2, length: PositiveInt = 8):
        self.observation_space = spaces.Box(1, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(num_arms)
        self._num_arms, self._length, self._step, self._arm = num_arms, length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step, self._arm = 0, int(self.np_random.integers(self._num_arms))
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step += 1
        return np.ones(1, np.float32), float(action == self._arm), False, self._step >= self._length, {}


@gin.configurable(module="alfish.environments.toy")
@checked
class Corridor(gymnasium.Env):
    """A row of rooms with a reward of 1 in the last one, which random actions practically never reach.

    One action of each room leads to the next room, and the others lead back to the one before. Which one leads on
    differs from room to room, and is the same in all episodes. The observation is the room's one-hot code. The best
    return is 1; a policy that does not explore earns 0.

    Args:
      num_rooms: rooms; an episode ends in the last one.
      num_actions: actions in each room.
      length: actions after which an episode is truncated; None: 3 for each room.
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
class Catch(gymnasium.Env):
    """A ball falls from a random column of a board, one row a step; a paddle at the bottom moves left, stays, or right.

    The observation is the image of the board. At the bottom row the episode ends with reward 1 if the paddle is below
    the ball, else -1.

    Args:
      rows, columns: of the board.
      scale: pixels of a field's side; 8 makes 80 x 40 pixels of 10 x 5 fields.
      mirrored: left and right are exchanged.

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
class MaskedIdentity(gymnasium.Env):
    """The action must be the observed number, and most other actions are forbidden, others at each step.

    The number is uniform. `action_masks()` and the info 'action_mask' are the mask, which always allows the right
    action. The best return is `length`; uniform allowed actions have length / (num_actions - num_forbidden).

    Args:
      num_actions: n.
      num_forbidden: of each step; below n.
      action: 'discrete'; 'multi_discrete', two numbers, each with its mask; 'multi_binary', n bits, each of which has
        one allowed value with probability num_forbidden / n.
      length: actions per episode, which is then truncated.

    Source: InvalidActionEnvDiscrete of sb3-contrib, with fresh masks at each step as there.
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
                f"MaskedIdentity.num_forbidden is {num_forbidden}; it must be below its {num_actions} actions"
            )
        spaces_of = {
            "discrete": spaces.Discrete(num_actions),
            "multi_discrete": spaces.MultiDiscrete([num_actions] * 2),
            "multi_binary": spaces.MultiBinary(num_actions),
        }
        self.observation_space = self.action_space = spaces_of[action]
        self._kind, self._size, self._num_forbidden, self._length = action, num_actions, num_forbidden, length
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
class TensorPointMass(VectorEnv):
    """A point on a line, stepped in torch for all environments together. The state can be saved and restored exactly.

    The action is a push in [-1, 1], the reward -|position|. The return is about -0.5 `length` without pushes, and about
    -0.5 at best.

    Args:
      num_envs: B.
      length: actions per episode, which is then truncated.
      device: device of all tensors.
      autoreset: 'next_step' or 'same_step'.
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
        self.num_envs, self.device, self._length = num_envs, torch.device(device), length
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
        restart = self._elapsed >= self._length  # never in SAME_STEP
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
