"""Transforms that add earlier time steps to observations when rows are used, so that each row is stored only once."""

from typing import Annotated, Any

import gin
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.data import StepType, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import Flat, OneHot
from alfish.networks.images import is_image
from alfish.parameters import Range, checked
from alfish.specs import ActionMask
from alfish.transforms.transform import RowReader, Transform


@gin.configurable(module="alfish.transforms")
@checked
class FrameStack(Transform):
    """Stacks each observation with the `num_frames - 1` observations before it, oldest first.

    At an episode's start, the first frame is repeated. A grey image [H, W] becomes [num_frames, H, W]. Images with
    channels, [H, W, C] or [C, H, W], are stacked along the channels. A vector [D] becomes [num_frames * D]. An action
    mask is not stacked: only its newest frame is used.

    The state has the frames before a row, leaves `[B, num_frames - 1, ...]`, oldest first.
    """

    def __init__(self, observation_spec: Nest, reward_spec: spaces.Box, num_frames: Annotated[int, Range(2)] = 4):
        super().__init__(observation_spec, reward_spec)
        self.num_frames = num_frames
        self.look_back = num_frames - 1
        self._raw_spec = observation_spec
        stacked = [self._stacked_spec(name, leaf) for name, leaf in nest.named_leaves(observation_spec, "observation")]
        self.observation_spec = nest.unflatten(nest.flatten(observation_spec)[1], stacked)

    def initial_state(self, batch_size: int) -> Nest:
        def frames(leaf: spaces.Box) -> torch.Tensor:
            return torch.from_numpy(np.zeros((batch_size, self.look_back, *leaf.shape), leaf.dtype))

        return nest.map(frames, self._raw_spec)

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[TimeStep, Nest]:
        first = time_step.step_type == StepType.FIRST

        def push(frame: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
            repeated = frame.unsqueeze(1).expand(-1, self.look_back, *frame.shape[1:])
            before = torch.where(nest.widened(first, before), repeated, before)
            return torch.cat([before, frame.unsqueeze(1)], 1)

        frames = nest.map(push, time_step.observation, state)  # [B, num_frames, ...]
        stacked = nest.map(self._join, frames, self._raw_spec)
        return time_step._replace(observation=stacked), nest.map(lambda leaf: leaf[:, 1:], frames)

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        """Stacks rows `[T, N]`; `state` has the frames before row 0."""
        num_rows, num_columns = time_step.step_type.shape
        device = time_step.step_type.device
        row = torch.arange(num_rows, device=device).unsqueeze(1)
        # For each row, the index of the FIRST row of its episode, or -look_back if that row is not among these rows.
        # The frame of the FIRST row replaces older frames of the stack.
        start = torch.where(time_step.step_type == StepType.FIRST, row, -self.look_back).cummax(0).values  # [T, N]
        age = torch.arange(self.look_back, -1, -1, device=device)  # oldest first
        source = torch.maximum(row.unsqueeze(-1) - age, start.unsqueeze(-1)) + self.look_back  # [T, N, num_frames]
        index = source * num_columns + torch.arange(num_columns, device=device).unsqueeze(-1)

        def gather(leaf: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
            rows = torch.cat([before.movedim(1, 0), leaf])  # [look_back + T, N, ...]
            picked = rows.flatten(0, 1).index_select(0, index.reshape(-1))
            return picked.reshape(*index.shape, *leaf.shape[2:])

        frames = nest.map(gather, time_step.observation, state)
        return time_step._replace(observation=nest.map(self._join, frames, self._raw_spec))

    def window_state(self, rows: RowReader, column: torch.Tensor, position: torch.Tensor) -> Nest:
        """Returns the frames that precede the stored rows at `column` and `position`."""
        age = torch.arange(self.look_back, -1, -1, device=position.device).unsqueeze(1)
        at = torch.maximum(position - age, rows.oldest_position(column))  # [num_frames, N]
        start = torch.where(rows.step_type(column, at) == StepType.FIRST, at, -1).amax(0)
        observation = rows.observation(column, torch.maximum(at[:-1], start))
        return nest.map(lambda leaf: leaf.movedim(0, 1), observation)

    def _join(self, frames: torch.Tensor, leaf: spaces.Box) -> torch.Tensor:
        """Reshapes `[*, num_frames, ...]` to the stacked shape."""
        if isinstance(leaf, ActionMask):
            return frames[..., -1, :]
        if len(leaf.shape) == 2:
            return frames
        if len(leaf.shape) == 3 and specs.has_channels_last(leaf.shape):
            return frames.movedim(-4, -2).flatten(-2)
        return frames.flatten(-len(leaf.shape) - 1, -len(leaf.shape))

    def _stacked_spec(self, name: str, leaf: spaces.Space) -> spaces.Space:
        if isinstance(leaf, ActionMask):
            return leaf
        if not isinstance(leaf, spaces.Box) or not 1 <= len(leaf.shape) <= 3:
            raise UsageError(f"FrameStack stacks vectors and images, but the {name} is {leaf}")

        def stacked(bound: np.ndarray) -> np.ndarray:
            frames = torch.from_numpy(np.repeat(bound[None], self.num_frames, 0))
            return self._join(frames, leaf).numpy()

        spec = spaces.Box(stacked(leaf.low), stacked(leaf.high), dtype=leaf.dtype)
        is_last = len(leaf.shape) == 3 and specs.has_channels_last(leaf.shape)
        if is_image(spec) and specs.has_channels_last(spec.shape) != is_last:  # encoders know only the shape
            raise UsageError(
                f"FrameStack makes {spec.shape} of the {name} {leaf.shape}, which encoders would interpret as an image "
                "with channels in another dimension; set another FrameStack.num_frames, or make the image square"
            )
        return spec


@gin.configurable(module="alfish.transforms")
@checked
class PreviousStep(Transform):
    """Adds the leaves `prev_action` and `prev_reward` to the observation; both are 0 at FIRST rows.

    An observation that is not a dict becomes the leaf `observation` of a dict. `prev_action` `[A']` is the executed
    action in the algorithm's units, with all its leaves side by side and one-hot codes of Discrete and MultiDiscrete
    entries. `prev_reward` `[1]` or `[R]` is the reward as earlier transforms in the chain have changed it; for example,
    it is normalized after a `RewardNormalizer`.

    Args:
      observation_spec, reward_spec: specs of the input rows.
      action_spec: canonical action nest.
      action, reward: whether to add `prev_action` and `prev_reward`.

    Raises:
      UsageError: the observation already has a leaf of this name, or `action` and `reward` are both False.
    """

    def __init__(
        self,
        observation_spec: Nest,
        reward_spec: spaces.Box,
        action_spec: Nest,
        action: bool = True,
        reward: bool = True,
    ):
        super().__init__(observation_spec, reward_spec)
        if not action and not reward:
            raise UsageError("PreviousStep.action and PreviousStep.reward are both False; leave the transform out")
        self._is_dict = isinstance(observation_spec, dict)
        self._adds_action, self._adds_reward = action, reward
        self.shows_rewards = reward
        codes: list[Any] = [_code(leaf) for leaf in nest.leaves(action_spec)]
        self._codes: Any = nn.ModuleList(codes)
        added = {"prev_action": sum(code.output_size for code in codes)} if action else {}
        added |= {"prev_reward": int(np.prod(reward_spec.shape))} if reward else {}
        taken = sorted(set(added) & set(observation_spec)) if self._is_dict else []
        if taken:
            raise UsageError(
                f"PreviousStep adds the leaf {taken[0]!r}, but the observation already has a leaf of this name; rename "
                "that leaf"
            )
        self.observation_spec = self._parts(observation_spec) | {
            name: spaces.Box(-np.inf, np.inf, (size,), np.float32) for name, size in added.items()
        }

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        first = (time_step.step_type == StepType.FIRST).unsqueeze(-1)
        observation = self._parts(time_step.observation)
        if self._adds_action:
            codes = [code(leaf) for code, leaf in zip(self._codes, nest.leaves(time_step.prev_action))]
            observation["prev_action"] = torch.where(first, 0.0, torch.cat(codes, -1))
        if self._adds_reward:
            reward = time_step.reward if self.reward_spec.shape else time_step.reward.unsqueeze(-1)
            observation["prev_reward"] = torch.where(first, 0.0, reward)
        return time_step._replace(observation=observation)

    def _parts(self, observation: Nest) -> dict[str, Nest]:
        return dict(observation) if self._is_dict else {"observation": observation}


def _code(leaf: spaces.Space) -> nn.Module:
    return OneHot(leaf) if isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)) else Flat(leaf)
