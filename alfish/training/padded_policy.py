"""Acting with a fixed batch size, so that an action does not depend on the number of environments."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from alfish import nest
from alfish.algorithms.acting import reset_state
from alfish.algorithms.contract import check_step
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import TimeStep
from alfish.nest import Nest
from alfish.runs import random_state
from alfish.transforms import Transforms


@runtime_checkable
class HasStateValue(Protocol):
    """An algorithm with an estimate of returns, which films can show."""

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[B]` of rows `[B]`, of what the policy maximizes; `state` as in `rollout_step`."""


# Float results depend on the batch size, so the policy is always called with this number of rows, padded.
POLICY_BATCH_SIZE = 8


# Outputs of a linear layer below which kernels round a row by its place in the batch: of 2 or 3 outputs, MKL computes
# the first rows and the last ones in another order.
NUM_OUTPUTS = 8


class _EqualPlaces(TorchFunctionMode):
    """Gives linear layers at least `NUM_OUTPUTS` outputs, so that a row's result does not depend on its place."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is not F.linear or arguments[1].shape[0] >= NUM_OUTPUTS:
            return function(*arguments, **(keywords or {}))
        x, weight, bias = (*arguments, None)[:3] if keywords is None else (*arguments[:2], keywords.get("bias"))
        lacking = NUM_OUTPUTS - len(weight)
        bias = None if bias is None else F.pad(bias, (0, lacking))
        return F.linear(x, F.pad(weight, (0, 0, 0, lacking)), bias)[..., : len(weight)]


class PaddedPolicy:
    """Acts in any number of environments by calls with `POLICY_BATCH_SIZE` rows, from the initial state on.

    Args:
      algorithm, transforms: are read only.
      num_envs: number of environments.
      sample: act by `rollout_step`, with a random generator for each episode; else by `predict_step`.
    """

    def __init__(self, algorithm: RLAlgorithm, transforms: Transforms, num_envs: int, sample: bool):
        self._algorithm, self._transforms, self._sample = algorithm, transforms, sample
        self._device = algorithm.progress.device
        self._num_envs = num_envs
        self._num_rows = -(-num_envs // POLICY_BATCH_SIZE) * POLICY_BATCH_SIZE
        self._initial_state = nest.to(algorithm.initial_state(self._num_rows), self._device)
        # Of all padded rows: the algorithm's, and the transforms'.
        self._state = self._initial_state, nest.to(transforms.initial_state(self._num_rows), self._device)
        self._generators: dict[int, list[torch.Tensor]] = {}  # by episode
        self._has_looked = False  # checked the result of predict_step

    def begin(self, episode: int, seed: int) -> None:
        """Seeds the generator of an episode."""
        if self._sample:
            random_state.seed_torch(seed)
            self._generators[episode] = random_state.torch_state(self._device)

    def act(self, time_step: TimeStep, episode: np.ndarray) -> Nest:
        """Returns actions `[num_envs, ...]`.

        Args:
          time_step: `[num_envs]`.
          episode: `[num_envs]` index of each environment's episode, or -1.
        """
        actions, states = [], []
        for block, part, before in self._blocks(time_step):
            step, after = self._act_block(part, before, episode[block].tolist())
            actions.append(step)
            states.append(after)
        self._state = _joined(states)
        action = _joined(actions)
        return action if self._num_rows == self._num_envs else nest.map(lambda leaf: leaf[: self._num_envs], action)

    def value(self, time_step: TimeStep) -> np.ndarray | None:
        """Returns the values `[num_envs]` of rows that `act` has not received yet; None: the algorithm has none."""
        if not isinstance(self._algorithm, HasStateValue):
            return None
        values: list[torch.Tensor] = []
        for _, part, before in self._blocks(time_step):
            seen, state, _ = self._seen(part, before)
            values.append(self._algorithm.state_value(seen, state))
        return torch.cat(values)[: self._num_envs].cpu().numpy().astype(np.float64)

    def _blocks(self, time_step: TimeStep) -> Iterator[tuple[slice, TimeStep, Nest]]:
        """Yields blocks of padded rows: their places, the rows, and the states before them."""
        if self._num_envs == POLICY_BATCH_SIZE:  # one block without padding
            yield slice(None), nest.to(time_step, self._device), (self._state, self._initial_state)
            return
        padding = torch.arange(self._num_rows, device=time_step.step_type.device).clamp(max=self._num_envs - 1)
        padded = nest.to(nest.map(lambda leaf: leaf[padding], time_step), self._device)
        for start in range(0, self._num_rows, POLICY_BATCH_SIZE):
            block = slice(start, start + POLICY_BATCH_SIZE)
            rows = padded, (self._state, self._initial_state)
            yield block, *nest.map(lambda leaf, block=block: leaf[block], rows)

    def _seen(self, time_step: TimeStep, before: Nest) -> tuple[TimeStep, Nest, Nest]:
        """Returns `POLICY_BATCH_SIZE` rows after transforms, the algorithm's state, and the transforms' next state."""
        (state, transform_state), initial_state = before
        stored = time_step._replace(observation=self._transforms.encode(time_step.observation))
        seen, transform_state = self._transforms(stored, transform_state)
        return seen, reset_state(state, initial_state, seen.step_type), transform_state

    def _act_block(self, time_step: TimeStep, before: Nest, episodes: list[int]) -> tuple[Nest, Nest]:
        """Returns actions and next states of `POLICY_BATCH_SIZE` rows, of which the first have episodes."""
        seen, state, transform_state = self._seen(time_step, before)
        if not self._sample:
            with _EqualPlaces():
                step = self._algorithm.predict_step(seen, state)
            if not self._has_looked:
                self._has_looked = True
                spec = self._algorithm.action_spec
                check_step(step, self._algorithm, "predict_step", spec, POLICY_BATCH_SIZE, before[1])
            return step.output, (step.state, transform_state)
        # One call for each episode, so that its noise depends on its own generator only.
        own: list[Any] = []
        for lane, k in enumerate(episodes):
            if k >= 0:
                random_state.set_torch_state(self._device, self._generators[k])
            alone = nest.map(lambda leaf, lane=lane: leaf[lane : lane + 1].expand_as(leaf), (seen, state))
            step = self._algorithm.rollout_step(*alone)
            if k >= 0:
                self._generators[k] = random_state.torch_state(self._device)
            own.append(nest.map(lambda leaf: leaf[:1], (step.output, step.state)))
        own += own[-1:] * (POLICY_BATCH_SIZE - len(own))
        output, state = nest.map(lambda *rows: torch.cat(rows), *own)
        return output, (state, transform_state)


def _joined(parts: list[Nest]) -> Nest:
    """Returns the rows of all blocks."""
    return parts[0] if len(parts) == 1 else nest.map(lambda *leaves: torch.cat(leaves), *parts)
