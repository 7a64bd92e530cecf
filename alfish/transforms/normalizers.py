"""Transforms with running statistics."""

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

import gin
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.data import StepType, TimeStep
from alfish.errors import UsageError
from alfish.functional.returns import reverse_scan
from alfish.nest import Nest
from alfish.networks.images import is_image
from alfish.parameters import PositiveFloat, UnitInterval, checked
from alfish.processes import replicas
from alfish.transforms.transform import Transform

EVERY_LEAF = ("*",)
RESOLUTION = 1e-6  # float32's precision, with a margin; smaller relative deviations are rounding errors


class RunningMoments(nn.Module):
    """Mean and variance of each entry over all observed rows of all learners, in float64.

    Source: Chan et al., 1979, eq. 2.1.
    """

    count: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor
    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(shape, dtype=torch.float64))  # sum of squared deviations
        # The transform reads these float32 buffers, which have no effect before rows are observed.
        self.register_buffer("shift", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    def update(self, rows: torch.Tensor, mask: torch.Tensor, epsilon: float) -> None:
        """Adds rows `[N, *shape]` where `mask` `[N]` is True."""
        mask = nest.widened(mask, rows)
        rows = torch.where(mask, rows, 0).double()
        number = replicas.total(mask.sum().double())
        safe = number.clamp(min=1)
        mean = replicas.total(rows.sum(0)) / safe
        squares = replicas.total(torch.where(mask, rows - mean, 0).square().sum(0))
        total = self.count + number
        divisor = total.clamp(min=1)
        delta = mean - self.mean
        # In-place methods, because the assignment of `+=` to a module's attribute takes longer than the sum.
        self.squares.add_(squares + delta.square() * self.count * number / divisor)
        self.mean.add_(delta * number / divisor)
        self.count.copy_(total)
        self.shift.copy_(self.mean)
        self.scale.copy_((self.squares / divisor + epsilon).rsqrt())
        self.scale.masked_fill_(total == 0, 1.0)  # all rows so far were PAD


@gin.configurable(module="alfish.transforms")
@checked
class ObservationNormalizer(Transform):
    """Shifts and scales float leaves to mean 0 and standard deviation 1 over all observed rows, and clips.

    Args:
      observation_spec, reward_spec: specs of the input rows.
      leaves: glob, or list of globs, for the paths of leaves to normalize. Only float leaves change. The default means
        all of them except images with bounds 0 and 255, which encoders scale; there may be none.
      clip: largest absolute output; None means that outputs are not clipped.
      epsilon: number added to the variance.
    """

    in_graphs = True

    def __init__(
        self,
        observation_spec: Nest,
        reward_spec: spaces.Box,
        leaves: Sequence[str] | str = EVERY_LEAF,
        clip: PositiveFloat | None = 10.0,
        epsilon: PositiveFloat = 1e-8,
    ):
        super().__init__(observation_spec, reward_spec)
        self._clip, self._epsilon = clip, epsilon
        bound = np.float32(np.inf if clip is None else clip)
        globs = [leaves] if isinstance(leaves, str) else leaves
        if not globs:
            raise UsageError("ObservationNormalizer.leaves is empty; list paths of leaves, or leave it out")
        paths, leaf_specs = nest.paths(observation_spec), nest.leaves(observation_spec)
        floats = [path for path, spec in zip(paths, leaf_specs) if specs.is_float(spec)]
        for glob in globs if globs != EVERY_LEAF else ():
            if not any(fnmatch(path, glob) for path in floats):
                known = specs.describe(observation_spec)
                raise UsageError(f"ObservationNormalizer.leaves has {glob!r}, which matches no float leaf of {known}")

        def moments(path: str, spec: spaces.Space) -> RunningMoments | None:
            chosen = path in floats and any(fnmatch(path, glob) for glob in globs)
            has_pixels = is_image(spec) and bool(np.all(spec.high == 255))  # type: ignore[attr-defined]
            chosen = chosen and not (has_pixels and globs == EVERY_LEAF)
            return RunningMoments(spec.shape or ()) if chosen else None

        # None for leaves that do not change.
        self._moments: Any = nn.ModuleList(moments(path, spec) for path, spec in zip(paths, leaf_specs))  # type: ignore[misc]
        remaining = iter(self._moments)
        self.observation_spec = nest.map(
            lambda spec: spaces.Box(-bound, bound, spec.shape) if next(remaining) else spec,
            observation_spec,
        )

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        return time_step._replace(observation=self.normalize(time_step.observation))

    def normalize(self, observation: Nest) -> Nest:
        """Returns the observation with normalized leaves, `[..., *shape]`."""
        remaining = iter(self._moments)

        def normalize(leaf: torch.Tensor) -> torch.Tensor:
            moments = next(remaining)
            if moments is None:
                return leaf
            scaled = (leaf - moments.shift) * moments.scale
            return scaled if self._clip is None else scaled.clamp(-self._clip, self._clip)

        return nest.map(normalize, observation)

    def observe(self, time_step: TimeStep) -> None:
        mask = (time_step.step_type != StepType.PAD).reshape(-1)
        for moments, leaf in zip(self._moments, nest.leaves(time_step.observation)):
            if moments is not None:
                moments.update(leaf.flatten(0, 1), mask, self._epsilon)


@gin.configurable(module="alfish.transforms")
@checked
class ObservationRescaler(ObservationNormalizer):
    """Shifts and scales entries of unusual size to mean 0 and standard deviation 1; other entries do not change.

    The size of an entry is its root mean square over all observed rows. Networks learn well from entries of usual size.
    Unchanged entries keep their resolution even if a few rows have extreme values. An entry of unusual size that is
    constant in all observed rows is shifted, but not scaled.

    Args:
      observation_spec, reward_spec: specs of the input rows.
      leaves: globs for the paths of leaves to rescale, as for `ObservationNormalizer`.
      smallest, largest: range of usual sizes; entries with sizes in this range do not change.
      epsilon: number added to the variance.
    """

    def __init__(
        self,
        observation_spec: Nest,
        reward_spec: spaces.Box,
        leaves: Sequence[str] | str = EVERY_LEAF,
        smallest: PositiveFloat = 0.01,
        largest: PositiveFloat = 100.0,
        epsilon: PositiveFloat = 1e-8,
    ):
        super().__init__(observation_spec, reward_spec, leaves, None, epsilon)
        self._smallest, self._largest = smallest, largest

    def observe(self, time_step: TimeStep) -> None:
        super().observe(time_step)
        for moments in filter(None, self._moments):
            variance = moments.squares / moments.count.clamp(min=1)
            size = (moments.mean.square() + variance).sqrt()
            is_usual = (size >= self._smallest) & (size <= self._largest)
            moments.shift.masked_fill_(is_usual, 0.0)
            # The scale of an entry that has been constant so far is unknown. With its variance of 0, a flag that later
            # becomes 1 would be scaled to 1 / sqrt(epsilon).
            is_constant = variance <= (RESOLUTION * moments.mean).square()
            moments.scale.masked_fill_(is_usual | is_constant, 1.0)


@gin.configurable(module="alfish.transforms")
@checked
class RewardNormalizer(Transform):
    """Divides rewards by the standard deviation of discounted running returns, and clips the result.

    The running return of an environment is updated as R <- gamma R + r, from 0 at each episode's start. The return is
    stored by `env_id`, so an environment may be in another column of the next unroll. The mean is not subtracted.
    Entries of a vector reward have separate standard deviations.

    Args:
      observation_spec, reward_spec: specs of the input rows.
      gamma: discount per environment step, equal to the algorithm's discount.
      clip: largest absolute output; None means that rewards are not clipped.
      epsilon: number added to the variance.
      largest_return: bound of returns after division, for values with a fixed range (`Bins`). The divisor is at least
        the largest absolute running return / `largest_return`, so that running returns, and most returns, stay within
        +-`largest_return`. None means no such bound.

    Source: Engstrom et al., 2020, section 3 (reward scaling); for the bound Lee et al., 2025, section 4.3,
    https://arxiv.org/abs/2502.15280.
    """

    changes_rewards = in_graphs = observes_rewards = True
    largest: torch.Tensor

    def __init__(
        self,
        observation_spec: Nest,
        reward_spec: spaces.Box,
        gamma: UnitInterval = 0.99,
        clip: PositiveFloat | None = 10.0,
        epsilon: PositiveFloat = 1e-8,
        largest_return: PositiveFloat | None = None,
    ):
        super().__init__(observation_spec, reward_spec)
        self._gamma = gamma
        self._clip = clip
        self._epsilon = epsilon
        self._largest_return = largest_return
        self._moments = RunningMoments(reward_spec.shape)
        if largest_return is not None:
            self.register_buffer("largest", torch.zeros(reward_spec.shape, dtype=torch.float64))
        # Running returns by `env_id`. Not a buffer, because the tensor grows with new environments.
        self._return: torch.Tensor | None = None
        self._num_columns = 0  # number of columns of the rows whose ids were read last

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        return time_step._replace(reward=self.normalize(time_step.reward))

    def normalize(self, reward: torch.Tensor) -> torch.Tensor:
        """Returns the reward divided by the standard deviation, and clipped."""
        scaled = reward * self._moments.scale
        return scaled if self._clip is None else scaled.clamp(-self._clip, self._clip)

    def observe(self, time_step: TimeStep) -> None:
        step_type, reward = time_step.step_type, time_step.reward.double()
        arrives = (step_type == StepType.MID) | (step_type == StepType.LAST)
        # R_t = increment_t + decay_t R_{t-1}: FIRST rows start from 0, PAD rows change nothing.
        decay = torch.where(arrives, self._gamma, (step_type == StepType.PAD).double())
        decay = decay.unsqueeze(-1) if reward.ndim > decay.ndim else decay
        increment = torch.where(nest.widened(arrives, reward), reward, 0)
        so_far, env_id = torch.zeros_like(increment), time_step.env_id[0].long()
        returns = self._returns(self._num_known(env_id), increment)
        for columns in _turns(env_id, (step_type != StepType.PAD).any(0)):
            increment[0, columns] += decay[0, columns] * returns[env_id[columns]]
            so_far[:, columns] = reverse_scan(decay[:, columns].flip(0), increment[:, columns].flip(0)).flip(0)
            returns[env_id[columns]] = so_far[-1, columns]
        self._return = returns
        rows, mask = nest.to((so_far.flatten(0, 1), arrives.reshape(-1)), self._moments.mean.device)
        self._moments.update(rows, mask, self._epsilon)
        # If all rewards so far are 0, the scale would be 1 / sqrt(epsilon), which would make the first nonzero reward
        # very large.
        self._moments.scale.masked_fill_(self._moments.squares == 0, 1.0)
        if self._largest_return is not None:
            _raise_to_largest(self.largest, torch.where(nest.widened(arrives, so_far), so_far.abs(), 0))
            bound = self._largest_return / self.largest  # infinite before the first reward other than 0
            self._moments.scale.copy_(torch.minimum(self._moments.scale.double(), bound))

    def get_extra_state(self) -> dict[str, torch.Tensor | None]:
        return {"return": self._return}

    def set_extra_state(self, state: dict[str, torch.Tensor | None]) -> None:
        self._return = state["return"]

    def _num_known(self, env_id: torch.Tensor) -> int:
        """Returns a number that is larger than all environment ids `[B]`.

        Ids on a device are read only when the number of columns changes, because reading waits for the device. With the
        same number of columns, they are assumed to be the same ids as before.
        """
        if env_id.device.type == "cpu" or self._return is None or len(env_id) != self._num_columns:
            self._num_columns = len(env_id)
            return int(env_id.max()) + 1
        return len(self._return)

    def _returns(self, num_envs: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the running returns of at least `num_envs` environments; new environments have 0."""
        new = like.new_zeros(num_envs, *like.shape[2:])
        return new if self._return is None else torch.cat([self._return.to(like.device), new[len(self._return) :]])


@gin.configurable(module="alfish.transforms")
@checked
class RewardRescaler(Transform):
    """Divides rewards of unusual size by their largest absolute value so far; other rewards do not change.

    Entries of vector rewards are treated separately.

    Args:
      observation_spec, reward_spec: specs of the input rows.
      smallest, largest: usual range of the largest absolute reward, in which rewards do not change.
    """

    changes_rewards = in_graphs = observes_rewards = True
    size: torch.Tensor
    scale: torch.Tensor

    def __init__(
        self,
        observation_spec: Nest,
        reward_spec: spaces.Box,
        smallest: PositiveFloat = 0.1,
        largest: PositiveFloat = 100.0,
    ):
        super().__init__(observation_spec, reward_spec)
        self._smallest, self._largest = smallest, largest
        self.register_buffer("size", torch.zeros(reward_spec.shape, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(reward_spec.shape))

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        return time_step._replace(reward=time_step.reward * self.scale)

    def observe(self, time_step: TimeStep) -> None:
        step_type, reward = time_step.step_type, time_step.reward.double()
        arrives = (step_type == StepType.MID) | (step_type == StepType.LAST)
        _raise_to_largest(self.size, torch.where(nest.widened(arrives, reward), reward.abs(), 0))
        is_unusual = (self.size > 0) & ((self.size < self._smallest) | (self.size > self._largest))
        self.scale.copy_(torch.where(is_unusual, 1 / self.size, 1.0))


def _raise_to_largest(sizes: torch.Tensor, found: torch.Tensor) -> None:
    """Raises `sizes` (`[]` or `[R]`) to the largest values in the rows of all learners (`[T, B]` or `[T, B, R]`)."""
    largest = found.amax((0, 1)).float()
    if replicas.is_joined():
        largest = torch.tensor(replicas.gather(*largest.reshape(-1).tolist())).amax(0).reshape(largest.shape)
    sizes.copy_(torch.maximum(sizes, nest.to(largest.double(), sizes.device)))


def _turns(env_id: torch.Tensor, is_real: torch.Tensor) -> list[Any]:
    """Returns groups of columns to process one after another; the columns of a group have distinct environments.

    An asynchronous unroll may have several columns of an environment, where each continues the previous column. Rows
    outside the CPU's memory form a single group, because their columns are assumed to be distinct environments.

    Args:
      env_id: global ids of the environments, `[B]` int64.
      is_real: columns to group, `[B]` bool. The ids of columns with only PAD rows are meaningless.
    """
    if env_id.device.type != "cpu":
        return [slice(None)]
    columns = is_real.nonzero().squeeze(1)
    ordered, order = env_id[columns].sort(stable=True)
    turn = torch.empty_like(order)
    turn[order] = torch.arange(len(order), device=order.device) - torch.searchsorted(ordered, ordered)
    return [columns[turn == k] for k in turn.unique()]
