"""The protocol of a transform, and the chain of them.

A transform is pure given its statistics. Statistics are buffers: they are saved and published with the weights, and
change once an iteration, in `observe`, after the learner has used them. So what the policy saw at rollout and what it
sees in training are the same numbers, and PPO's first ratio is exactly 1.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.parameters.parts import build


class RowReader(Protocol):
    """Stored rows that a transform may look up: what replay offers. `column` is `[N]`, `position` `[K, N]`, int64."""

    def step_type(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor: ...

    def observation(self, column: torch.Tensor, position: torch.Tensor) -> Nest: ...

    def oldest_position(self, column: torch.Tensor) -> torch.Tensor: ...


class Transform(nn.Module):
    """Changes what is seen of rows: a module, so that its statistics are saved and move to devices with it.

    Args:
      observation_spec, reward_spec: of the rows that come in.

    Attributes:
      observation_spec, reward_spec: of the rows that go out; a subclass replaces them where it changes them.
      look_back: how many rows before a row it needs to know.
      changes_rewards: whether rewards come out otherwise than they come in.
    """

    look_back = 0
    changes_rewards = False

    def __init__(self, observation_spec: Nest, reward_spec: spaces.Box):
        super().__init__()
        self.observation_spec, self.reward_spec = observation_spec, reward_spec

    def initial_state(self, batch_size: int) -> Nest:
        """What is carried from row to row while acting, one a column; None: nothing is."""
        return None

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[TimeStep, Nest]:
        """Transforms one row `[B]` of each column while acting. Never in place. Default: as in training."""
        return self.transform(time_step, state), state

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        """Transforms consecutive rows `[T, N]` in training, from the state that was carried into row 0."""
        raise NotImplementedError(f"{type(self).__name__} must define transform")

    def window_state(self, rows: RowReader, column: torch.Tensor, position: torch.Tensor) -> Nest:
        """The state carried into stored rows (`[N]` each), looked up from rows before them. Default: there is none."""
        return None

    def observe(self, time_step: TimeStep) -> None:
        """Updates the statistics from new rows `[T, B]`, transformed by the transforms before this one.

        PAD rows count for nothing. Default: there are no statistics.
        """


class Transforms(nn.Module):
    """A chain of transforms, the first one applied first.

    Args:
      factories: transform classes, or configured ones, taking (observation_spec, reward_spec).
      observation_spec, reward_spec: of raw rows.

    Attributes:
      raw_observation_spec: of the rows that come in.
      observation_spec, reward_spec: of the rows that go out.
    """

    def __init__(
        self,
        factories: Sequence[Callable[[Nest, spaces.Box], Transform]],
        observation_spec: Nest,
        reward_spec: spaces.Box,
    ):
        super().__init__()
        self.raw_observation_spec = observation_spec
        self.observation_spec, self.reward_spec = observation_spec, reward_spec
        self._chain: Any = nn.ModuleList()
        for factory in factories:
            specs = self.observation_spec, self.reward_spec
            transform = build(factory, Transform, "Trainer.transforms", *specs)
            if transform.look_back and len(self._chain):
                raise UsageError(
                    f"{type(transform).__name__} looks rows up as they are stored, raw: put it first of the transforms"
                )
            self._chain.append(transform)
            self.observation_spec, self.reward_spec = transform.observation_spec, transform.reward_spec

    def __len__(self) -> int:
        """How many there are; an empty chain changes nothing."""
        return len(self._chain)

    def initial_state(self, batch_size: int) -> Nest:
        return tuple(transform.initial_state(batch_size) for transform in self._chain)

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[TimeStep, Nest]:
        if not state:
            return time_step, state
        states = []
        for transform, before in zip(self._chain, state, strict=True):
            found, after = transform(time_step, before)
            time_step = _checked(found, transform)
            states.append(after)
        return time_step, tuple(states)

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        for transform, before in zip(self._chain, state or (), strict=True):
            time_step = _checked(transform.transform(time_step, before), transform)
        return time_step

    def window_state(self, rows: RowReader, column: torch.Tensor, position: torch.Tensor) -> Nest:
        return tuple(transform.window_state(rows, column, position) for transform in self._chain)

    @property
    def look_back(self) -> int:
        return max((transform.look_back for transform in self._chain), default=0)

    @property
    def changes_rewards(self) -> bool:
        return any(transform.changes_rewards for transform in self._chain)

    @torch.no_grad()
    def observe(self, time_step: TimeStep, state: Nest, num_seen: int) -> None:
        """Updates all statistics from raw rows `[T, B]`, the first `num_seen` of which were observed before."""
        for transform, before in zip(self._chain, state or (), strict=True):
            # The statistics in use transform what the next one observes, before they change.
            after = transform.transform(time_step, before)
            transform.observe(nest.at(time_step, slice(num_seen, None)))
            time_step = after


def _checked(found: Any, transform: Transform) -> TimeStep:
    """Returns what a transform returned; raises UsageError where that is no time step."""
    if isinstance(found, TimeStep):
        return found
    kind = "None" if found is None else f"a {type(found).__name__}"
    raise UsageError(
        f"{type(transform).__name__}.transform returned {kind}; it returns the time step, as in return "
        "time_step._replace(observation=...)"
    )
