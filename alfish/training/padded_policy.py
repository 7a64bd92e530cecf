"""Acts with a fixed batch size, so that an action does not depend on the number of environments."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from alfish import nest
from alfish.algorithms.acting import Actor
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import StepType, TimeStep
from alfish.nest import Nest
from alfish.runs import random_state
from alfish.transforms import Transforms

# Float results depend on the batch size, so the policy is always called with this number of rows, including padding.
POLICY_BATCH_SIZE = 8


_OWN = 1  # number that is mixed into the seed of an episode's generator, see `PaddedPolicy.begin`

# Smallest number of outputs of a linear layer for which rounding does not depend on a row's index in the batch. With 2
# or 3 outputs, MKL adds the products of the first and last rows in a different order than those of other rows.
NUM_OUTPUTS = 8


class _EqualPlaces(TorchFunctionMode):
    """Gives linear layers at least `NUM_OUTPUTS` outputs, so that a row's index does not change its result."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        call = _padded_linear if function is F.linear else function
        return call(*arguments, **(keywords or {}))


def _padded_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns what `F.linear` returns, computed with at least `NUM_OUTPUTS` outputs."""
    lacking = NUM_OUTPUTS - len(weight)
    if lacking <= 0:
        return F.linear(input, weight, bias)
    bias = None if bias is None else F.pad(bias, (0, lacking))
    return F.linear(input, F.pad(weight, (0, 0, 0, lacking)), bias)[..., : len(weight)]


class PaddedPolicy:
    """Acts in any number of environments, with calls of the networks on `batch_size` rows each.

    Args:
      algorithm, transforms: modules that act; they are only read.
      num_envs: number of environments.
      sample: whether to act with `rollout_step`, with a random generator for each episode; if not, with `predict_step`.
      has_gaps: whether rows may be PAD; the states of such rows do not change.
      batch_size: number of rows of a call.
    """

    def __init__(
        self,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        num_envs: int,
        sample: bool,
        has_gaps: bool = False,
        batch_size: int = POLICY_BATCH_SIZE,
    ):
        self._batch_size = batch_size
        self._actor, self._has_gaps = Actor(algorithm, transforms, sample), has_gaps
        self._device, self._num_envs = self._actor.device, num_envs
        self._num_rows = -(-num_envs // self._batch_size) * self._batch_size
        self._state = self._actor.first_state(self._num_rows)  # states of all rows, padding included
        self._initial_state = self._state[1]
        self._generators: dict[int, list[torch.Tensor]] = {}  # generators by episode
        self._has_looked = False  # whether the result of `predict_step` was checked

    def begin(self, episode: int, seed: int) -> None:
        """Seeds the generator of an episode.

        The generator differs from one that an environment seeds with the same number, so that actions do not depend on
        the environment's random numbers.
        """
        if self._actor.samples:
            random_state.seed_torch(int(np.random.SeedSequence([seed, _OWN]).generate_state(1)[0]))
            self._generators[episode] = random_state.torch_state(self._device)

    def act(self, time_step: TimeStep, episode: np.ndarray) -> Nest:
        """Returns actions `[num_envs, ...]`.

        Args:
          time_step: rows of all environments, `[num_envs]`.
          episode: index of each environment's episode, or -1, `[num_envs]`.
        """
        actions, states = [], []
        for block, part, before in self._blocks(time_step):
            step, after = self._act_block(part, before, episode[block].tolist())
            actions.append(step)
            states.append(after)
        before, self._state = self._state, _joined(states)
        if self._has_gaps and nest.leaves(before):
            is_absent = torch.ones(self._num_rows, dtype=torch.bool, device=self._device)
            is_absent[: self._num_envs] = time_step.step_type.to(self._device) == StepType.PAD
            self._state = nest.where(is_absent, before, self._state)
        action = _joined(actions)
        return action if self._num_rows == self._num_envs else nest.map(lambda leaf: leaf[: self._num_envs], action)

    def value(self, time_step: TimeStep) -> np.ndarray | None:
        """Returns values `[num_envs]` of rows; call it before `act`. None if the algorithm has no values."""
        algorithm = self._actor.algorithm
        if not algorithm.overrides("state_value"):
            return None
        values: list[torch.Tensor] = []
        for _, part, before in self._blocks(time_step):
            seen, _, state = self._see(part, before)
            values.append(algorithm.state_value(seen, state))
        return torch.cat(values)[: self._num_envs].cpu().numpy().astype(np.float64)

    def _blocks(self, time_step: TimeStep) -> Iterator[tuple[slice, TimeStep, Nest]]:
        """Yields blocks of padded rows: the slice of their indices, the rows, and the states for acting on the rows."""
        if self._num_envs == self._batch_size:  # one block without padding
            yield slice(None), nest.to(time_step, self._device), (*self._state, self._initial_state)
            return
        padding = torch.arange(self._num_rows, device=time_step.step_type.device).clamp(max=self._num_envs - 1)
        padded = nest.to(nest.map(lambda leaf: leaf[padding], time_step), self._device)
        for start in range(0, self._num_rows, self._batch_size):
            block = slice(start, start + self._batch_size)
            rows = padded, (*self._state, self._initial_state)
            yield block, *nest.map(lambda leaf, block=block: leaf[block], rows)

    def _see(self, time_step: TimeStep, before: Nest) -> tuple[TimeStep, Nest, Nest]:
        """Returns the result of `Actor.see` for a block of raw rows."""
        stored = self._actor.transforms.encode(time_step.observation)
        return self._actor.see(time_step._replace(observation=stored), *before)

    def _act_block(self, time_step: TimeStep, before: Nest, episodes: list[int]) -> tuple[Nest, Nest]:
        """Returns actions and next states of a block of rows; the first rows belong to `episodes`."""
        seen, transform_state, state = self._see(time_step, before)
        if not self._actor.samples:
            with _EqualPlaces():
                step = self._actor.step(seen, state)
            if not self._has_looked:
                self._has_looked = True
                self._actor.check(step, before[-1], self._batch_size)
            return step.output, (transform_state, step.state)
        # One call for each episode, so that its noise depends only on its own generator.
        own: list[Any] = []
        for lane, k in enumerate(episodes):
            if k >= 0:
                random_state.set_torch_state(self._device, self._generators[k])
            alone = nest.map(lambda leaf, lane=lane: leaf[lane : lane + 1].expand_as(leaf), (seen, state))
            step = self._actor.step(*alone)
            if k >= 0:
                self._generators[k] = random_state.torch_state(self._device)
            own.append(nest.map(lambda leaf: leaf[:1], (step.output, step.state)))
        own += own[-1:] * (self._batch_size - len(own))
        output, state = nest.map(lambda *rows: torch.cat(rows), *own)
        return output, (transform_state, state)


def _joined(parts: list[Nest]) -> Nest:
    """Returns the rows of all blocks as one nest."""
    return parts[0] if len(parts) == 1 else nest.map(lambda *leaves: torch.cat(leaves), *parts)
