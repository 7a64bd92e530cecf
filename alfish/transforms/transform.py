"""The base class of transforms, and chains of them.

With fixed statistics, a transform is a pure function. Statistics are buffers: they are saved and published with the
weights, and change once per iteration, in `observe`, after the updates. Rollout and training therefore transform a row
to the same values, and PPO's first ratio is exactly 1. With `Trainer.calibration`, statistics change only before the
first update.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.compiler import torch_internals
from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks.buffers import BufferKeeper
from alfish.parameters.parts import build, parameter_names


class RowReader(Protocol):
    """Interface of stored rows that a transform may read. `column` is `[N]` and `position` `[K, N]`, int64."""

    def step_type(self, column: torch.Tensor, position: torch.Tensor) -> torch.Tensor: ...

    def observation(self, column: torch.Tensor, position: torch.Tensor) -> Nest: ...

    def oldest_position(self, column: torch.Tensor) -> torch.Tensor: ...


class Transform(nn.Module):
    """Base class of transforms: a function of rows, in a module with its statistics.

    Args:
      observation_spec, reward_spec: specs of the input rows.

    Attributes:
      observation_spec, reward_spec: specs of the output rows; a subclass replaces the specs that it changes. The first
        output is checked against these specs.
      look_back: number of earlier rows on which the output of a row depends.
      changes_rewards: whether the transform changes rewards.
      shows_rewards: whether the output observation of a row contains the row's reward.
      in_graphs: whether a compiled update can contain the transform. Each output row must then depend only on its input
        row, the transform's buffers and random numbers, through operations of torch.
      observes_rewards: whether `observe` reads only step types, rewards and environment ids. These leaves may then be
        on the host even if the statistics are on a GPU.
      augments: whether `transform` changes rows at random, and `forward` does not; for off-policy training only.
      encodes: whether the transform defines only `encode`, which changes observations once, before their row is stored.
      source: part of another run from which a new run reads the transform's `encoder`, such as
        'network.actor_torso.encoder.encoders.0@runs/x'; None if the encoder is not read from another run.
      is_calibrated: whether the statistics are those of another run, so that rows do not change them.
    """

    look_back = 0
    changes_rewards = False
    shows_rewards = False
    in_graphs = False
    observes_rewards = False
    augments = False
    encodes = False
    source: str | None = None
    is_calibrated = False

    def __init__(self, observation_spec: Nest, reward_spec: spaces.Box):
        super().__init__()
        self.observation_spec, self.reward_spec = observation_spec, reward_spec

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the state at the start of acting, `[B, ...]`; None without state."""
        return None

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[TimeStep, Nest]:
        """Transforms one row `[B]` while acting; returns the result and the next state. Does not write in place.

        Default: `transform`.
        """
        return self.transform(time_step, state), state

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        """Transforms consecutive rows `[T, N]` in training, starting from the state before row 0."""
        raise NotImplementedError(f"{type(self).__name__} must define transform")

    def window_state(self, rows: RowReader, column: torch.Tensor, position: torch.Tensor) -> Nest:
        """Returns the state before stored rows, computed from the rows before them. Default: None.

        Args:
          rows: stored rows.
          column, position: columns and positions of the rows, `[N]` int64 each.
        """
        return None

    def encode(self, observation: Nest) -> Nest:
        """Returns the stored form of raw observations `[B, ...]`; must not depend on statistics or state."""
        raise NotImplementedError(f"{type(self).__name__} must define encode")

    def observe(self, time_step: TimeStep) -> None:
        """Updates the statistics with new rows `[T, B]`, as transformed by the previous transforms.

        PAD rows do not count. Default: does nothing.
        """


def has_statistics(transform: Transform) -> bool:
    """Returns whether the transform learns from rows."""
    return type(transform).observe is not Transform.observe


class Transforms(nn.Module):
    """A chain of transforms, applied in order.

    The first transforms of the chain may be encoders, which `encode` applies once, before rows are stored. All other
    transforms are applied to stored rows whenever rows are used.

    Args:
      factories: classes or factories of transforms; called with (observation_spec, reward_spec) and, if they have such
        a parameter, `action_spec`.
      observation_spec, reward_spec: specs of raw rows.
      action_spec: canonical spec of the actions, see `alfish.specs`; None if no transform takes it.

    Attributes:
      raw_observation_spec, raw_reward_spec: specs of the environment's rows.
      stored_observation_spec: spec of stored observations, which are raw unless an encoder changes them.
      observation_spec, reward_spec: specs of the output rows.
      encoders, others: transforms that encode observations before rows are stored, and transforms of stored rows.
    """

    def __init__(
        self,
        factories: Sequence[Callable[[Nest, spaces.Box], Transform]],
        observation_spec: Nest,
        reward_spec: spaces.Box,
        action_spec: Nest = None,
    ):
        super().__init__()
        self.raw_observation_spec = self.stored_observation_spec = observation_spec
        self.observation_spec, self.reward_spec = observation_spec, reward_spec
        self.raw_reward_spec = reward_spec
        self._chain: Any = nn.ModuleList()
        self.encoders: list[Transform] = []
        self.others: list[Transform] = []
        self._fit: set[Transform] = set()  # transforms whose output was checked against their spec
        for factory in factories:
            given = self.observation_spec, self.reward_spec
            keywords = {"action_spec": action_spec} if "action_spec" in parameter_names(factory) else {}
            transform = build(factory, Transform, "Trainer.transforms", *given, **keywords)
            name = type(transform).__name__
            if transform.encodes and self.others:
                raise UsageError(
                    f"{name} encodes observations before they are stored, so no other transform may change them first; "
                    "put it first in Trainer.transforms"
                )
            if transform.look_back and self.others:
                raise UsageError(f"{name} reads stored rows, which are raw; put it first in Trainer.transforms")
            if type(transform).load_state_dict is not nn.Module.load_state_dict:
                raise UsageError(
                    f"{name} defines load_state_dict, which torch does not call for submodules, so a resumed run would "
                    "lose its state; keep the state in buffers, or define get_extra_state and set_extra_state"
                )
            self._chain.append(transform)
            (self.encoders if transform.encodes else self.others).append(transform)
            self.observation_spec, self.reward_spec = transform.observation_spec, transform.reward_spec
            if transform.encodes:
                self.stored_observation_spec = self.observation_spec
        self._keeper = BufferKeeper(self)

    def __len__(self) -> int:
        """Number of transforms of stored rows."""
        return len(self.others)

    @torch.no_grad()
    def encode(self, observation: Nest) -> Nest:
        """Returns the stored form of raw observations `[B, ...]`."""
        for transform in self.encoders:
            observation = transform.encode(observation)
        return observation

    def sources(self) -> dict[str, str]:
        """Returns the part of another run from which each encoder is read, by the encoder's name in the state."""
        chain = enumerate(self._chain)
        return {f"_chain.{k}.encoder": transform.source for k, transform in chain if transform.source is not None}

    def initial_state(self, batch_size: int) -> Nest:
        return tuple(transform.initial_state(batch_size) for transform in self.others)

    def forward(self, time_step: TimeStep, state: Nest) -> tuple[TimeStep, Nest]:
        if not state:
            return time_step, state
        states = []
        for transform, before in zip(self.others, state, strict=True):
            found, after = transform(time_step, before)
            time_step = self._checked(found, transform)
            states.append(after)
        return time_step, tuple(states)

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        for transform, before in zip(self.others, state or (), strict=True):
            time_step = self._checked(transform.transform(time_step, before), transform)
        return time_step

    def window_state(self, rows: RowReader, column: torch.Tensor, position: torch.Tensor) -> Nest:
        return tuple(transform.window_state(rows, column, position) for transform in self.others)

    @property
    def look_back(self) -> int:
        return max((transform.look_back for transform in self.others), default=0)

    @property
    def in_graphs(self) -> bool:
        return all(transform.in_graphs for transform in self.others)

    @property
    def keep_statistics(self) -> bool:
        return any(has_statistics(transform) and not transform.is_calibrated for transform in self.others)

    @property
    def changes_rewards(self) -> bool:
        return any(transform.changes_rewards for transform in self.others)

    @torch.no_grad()
    def observe(self, time_step: TimeStep, state: Nest, num_seen: int) -> None:
        """Updates all statistics with raw rows `[T, B]` on any device; the first `num_seen` are already counted."""
        device, origin = next(self.buffers(), time_step.step_type).device, time_step.step_type.device
        self._keeper.remember()
        raw: TimeStep | None = time_step  # raw rows; None after a transform that changes rewards
        for transform, before in zip(self.others, state or (), strict=True):
            if transform.observes_rewards:
                # Rows that come from the host stay there. Several of their columns may be one environment, so
                # `RewardNormalizer` reads their ids, and reading from a GPU would wait for the updates.
                seen = nest.to(time_step, origin) if raw is None else raw
            else:
                seen = time_step = nest.to(time_step, device)
            if transform is not self.others[-1]:
                # The next transform observes the output of this transform, made with the statistics before this update.
                time_step = transform.transform(*nest.to((time_step, before), device))
                raw = None if transform.changes_rewards else raw
            if not transform.is_calibrated:
                transform.observe(nest.at(seen, slice(num_seen, None)))
        self._keeper.restore()

    def _checked(self, found: Any, transform: Transform) -> TimeStep:
        """Returns a transform's result; raises UsageError if it is not a time step or does not fit the spec."""
        if not isinstance(found, TimeStep):
            kind = "None" if found is None else f"a {type(found).__name__}"
            raise UsageError(
                f"{type(transform).__name__}.transform returned {kind}; it must return the time step, as in return "
                "time_step._replace(observation=...)"
            )
        if transform not in self._fit:
            _check_fits(found, transform)
            self._fit.add(transform)
        return found


def _check_fits(time_step: TimeStep, transform: Transform) -> None:
    """Raises UsageError if observations or rewards of rows do not fit the transform's specs."""
    name, spec, observation = type(transform).__name__, transform.observation_spec, time_step.observation
    remedy = "in its constructor, set self.observation_spec to the space of what it returns"
    if nest.paths(observation) != nest.paths(spec):
        found, wanted = (", ".join(nest.paths(each)) or "one" for each in (observation, spec))
        raise UsageError(f"{name} returned the observations {found}, but its observation_spec has {wanted}; {remedy}")
    for path, leaf, space in zip(nest.paths(spec), nest.leaves(observation), nest.leaves(spec)):
        rows = tuple(time_step.step_type.shape)
        if tuple(leaf.shape[: len(rows)]) != rows:
            raise UsageError(
                f"{name} returned observations{f' {path}' if path else ''} of shape {tuple(leaf.shape)} for rows of "
                f"shape {rows}; return one observation for each row"
            )
        shape, dtype = tuple(leaf.shape[len(rows) :]), str(leaf.dtype).removeprefix("torch.")
        if shape != space.shape or dtype != str(specs.torch_dtype(space)).removeprefix("torch."):
            raise UsageError(
                f"{name} returned observations{f' {path}' if path else ''} of shape {shape} and {dtype}, but its "
                f"observation_spec has {space}; {remedy}"
            )
    shape = tuple(time_step.reward.shape[time_step.step_type.ndim :])
    if shape != transform.reward_spec.shape:
        raise UsageError(
            f"{name} returned rewards of shape {shape}, but its reward_spec has {transform.reward_spec.shape}; in its "
            "constructor, set self.reward_spec to the space of what it returns"
        )


class TransformsInGraph:
    """A chain of transforms as a nest, whose leaves are the statistics.

    Args:
      transforms: transforms that are `in_graphs`.
      statistics: statistics that replace the transforms' buffers, in the same order.
    """

    def __init__(self, transforms: Transforms, statistics: Sequence[torch.Tensor]):
        self.transforms, self.statistics = transforms, tuple(statistics)

    def __call__(self, time_step: TimeStep) -> TimeStep:
        """Returns transformed rows `[T, N]`."""
        names = [name for name, _ in self.transforms.named_buffers()]
        states = (None,) * len(self.transforms)
        with torch_internals.reparametrize_module(self.transforms, dict(zip(names, self.statistics, strict=True))):
            return self.transforms.transform(time_step, states)


nest.add_kind(
    TransformsInGraph,
    lambda this: (this.statistics, this.transforms),
    lambda transforms, statistics: TransformsInGraph(transforms, statistics),
)
