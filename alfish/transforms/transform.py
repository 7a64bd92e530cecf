"""The protocol of a transform, and the chain of them.

A transform is pure given its statistics. Statistics are buffers: they are saved and published with the weights, and
change once an iteration, in `observe`, after the learner has used them. So what the policy saw at rollout and what it
sees in training are the same numbers, and PPO's first ratio is exactly 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from alfish.data import TimeStep
from alfish.nest import Nest


class Transform(nn.Module):
    """Args:
    observation_spec, reward_spec: of the rows that come in.

    Attributes:
      observation_spec, reward_spec: of the rows that go out; a subclass replaces them where it changes them.
    """

    def __init__(self, observation_spec: Nest, reward_spec: spaces.Box):
        super().__init__()
        self.observation_spec, self.reward_spec = observation_spec, reward_spec

    def initial_state(self, batch_size: int) -> Nest:
        """What is carried from row to row while acting, one a column; None: nothing is."""
        return None

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[TimeStep, Nest]:
        """Transforms one row `[B]` of each column while acting. Never in place."""
        return self.transform(time_step), state

    def transform(self, time_step: TimeStep) -> TimeStep:
        """Transforms rows of any leading dims; in training, whole unrolls `[T, B]`."""
        raise NotImplementedError(f"{type(self).__name__} must define transform")

    def observe(self, time_step: TimeStep) -> None:
        """Updates the statistics from new rows `[T, B]`, transformed by the transforms before this one.

        PAD rows count for nothing. Default: there are no statistics.
        """


class Transforms(nn.Module):
    """A chain of transforms, the first one applied first.

    Args:
      factories: transform classes, or configured ones, taking (observation_spec, reward_spec).
      observation_spec, reward_spec: of raw rows.
    """

    def __init__(
        self, factories: Sequence[Callable[[Nest, spaces.Box], Transform]], observation_spec: Nest,
        reward_spec: spaces.Box,
    ):  # fmt: skip
        super().__init__()
        self.observation_spec, self.reward_spec = observation_spec, reward_spec
        self._chain: Any = nn.ModuleList()
        for factory in factories:
            transform = factory(self.observation_spec, self.reward_spec)
            self._chain.append(transform)
            self.observation_spec, self.reward_spec = transform.observation_spec, transform.reward_spec

    def initial_state(self, batch_size: int) -> Nest:
        return tuple(transform.initial_state(batch_size) for transform in self._chain)

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[TimeStep, Nest]:
        if not state:
            return time_step, state
        states = []
        for transform, before in zip(self._chain, state):
            time_step, after = transform(time_step, before)
            states.append(after)
        return time_step, tuple(states)

    def transform(self, time_step: TimeStep) -> TimeStep:
        for transform in self._chain:
            time_step = transform.transform(time_step)
        return time_step

    @torch.no_grad()
    def observe(self, time_step: TimeStep) -> None:
        """Updates all statistics from raw rows `[T, B]` that were not observed before."""
        for transform in self._chain:
            # The statistics in use transform what the next one observes, before they change.
            after = transform.transform(time_step)
            transform.observe(time_step)
            time_step = after
