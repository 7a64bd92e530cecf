"""Frame stacks, which are built when rows are used, so that each frame is stored only once."""

from typing import Annotated

import gin
import numpy as np
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.data import StepType, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
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
