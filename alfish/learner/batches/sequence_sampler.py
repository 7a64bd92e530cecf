"""Sampling of windows for the learner: draws windows from a ring, relabels goals, and adds the transforms' state."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from alfish import host, nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Batch, StepType
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.errors.user_code import calling, check_methods, overridden
from alfish.learner.batches.batches import Batches, Minibatches
from alfish.offline import OfflineBuffer, Spaces
from alfish.parameters.parts import build, parameter_names
from alfish.processes import replicas
from alfish.replay import HindsightReplay, ReplayView, RingBuffer, Sampler, SequenceIndex
from alfish.replay.samplers import check_drawn
from alfish.transforms import Transforms, TransformsInGraph

OBSERVED_ROWS = 1024  # rows of each column that `observe` reads at a time


class SequenceSampler:
    """Draws windows from one ring for an algorithm, and relabels their goals in hindsight.

    Args:
      buffer: ring to draw from.
      sampler: class or factory of the sampler.
      hindsight: class or factory of hindsight relabelling; None means that windows keep their goals.
      algorithm: algorithm that trains on the windows.
      transforms: transforms of the run; windows have the transforms' state, but are not transformed yet.
      num_rows: number of rows in each window, burn-in included.
      burn_in: number of burn-in rows before the drawn row, which is the first row that trains; for recorded data only.
        In a ring that stores recurrent states, burn-in begins at the drawn row, so this must be 0.
    """

    def __init__(
        self,
        buffer: RingBuffer,
        sampler: Callable[[], Sampler],
        hindsight: Callable[[], HindsightReplay] | None,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        num_rows: int,
        burn_in: int = 0,
    ):
        self.buffer, self.sampler = buffer, build(sampler, Sampler, "the sampler of windows")
        self.sampler.bind(buffer, num_rows)
        check_methods(self.sampler, Sampler)
        self._checks_draws = "draw" in overridden(self.sampler)
        self._hindsight = None if hindsight is None else build(hindsight, HindsightReplay, "the hindsight of windows")
        if self._hindsight is not None:
            if any(each.shows_rewards for each in transforms.others):
                raise UsageError(
                    "HindsightReplay changes the goal of windows, but a transform shows the reward before row 0, which "
                    "belongs to the old goal; set PreviousStep.reward to False, or leave the transform out"
                )
            if transforms.look_back:
                raise UsageError(
                    "HindsightReplay changes the goal of windows, but a transform reads rows before the windows, which "
                    "have the old goal; leave the transform out"
                )
            if buffer.state_period is not None:
                raise UsageError(
                    f"HindsightReplay changes the goal of windows, but the memory of {type(algorithm).__name__} begins "
                    "with a state that was computed under the old goal; leave out the memory or hindsight"
                )
            self._hindsight.bind(buffer, transforms.stored_observation_spec)
        self._algorithm, self._transforms, self._num_rows = algorithm, transforms, num_rows
        self._burn_in = 0 if self._hindsight is not None else burn_in
        self._progress, self._device = nest.host_view(algorithm.progress), algorithm.progress.device
        self._stored: ReplayView | None = None

    def start(self, environment: Environment) -> None:
        """Looks up the environment's methods that hindsight calls; raises UsageError if a method is missing."""
        if self._hindsight is not None:
            self._hindsight.start(environment)

    def draw(self, num_windows: int, num_batches: int) -> SequenceIndex:
        """Draws the N windows of `num_batches` minibatches at once; returns the windows' first rows."""
        on_cpu = self._device.type == "cpu"
        progress = float(self._progress) if on_cpu else self._algorithm.progress_number()
        if not self._checks_draws:
            return self.sampler.draw(num_windows, progress, num_batches)
        name = f"{type(self.sampler).__name__}.draw"
        with calling(name):
            start = self.sampler.draw(num_windows, progress, num_batches)
        check_drawn(start, num_windows, self.buffer, self._num_rows, name)
        return start

    def in_place(self) -> ReplayView | None:
        """Returns a view of the stored rows, the same in every call; None if graphs cannot gather batches from it."""
        if self._stored is None:
            has_state = self._algorithm.replay_needs.recurrent_state
            can_gather = self._hindsight is None and self._transforms.in_graphs and not has_state
            if can_gather and self.buffer.device == self._device:
                self._stored = self.buffer.in_place(self._num_rows)
                if self._stored is not None and self._transforms:
                    transforms = TransformsInGraph(self._transforms, list(self._transforms.buffers()))
                    self._stored = self._stored._replace(transforms=transforms)
        return self._stored

    def at(self, start: SequenceIndex) -> Batch:
        """Returns the raw rows `[L, N]` of windows that begin at `start`, relabelled, on the algorithm's device."""
        buffer, algorithm = self.buffer, self._algorithm
        if self._burn_in:
            start = start._replace(position=start.position - self._burn_in)
        batch = buffer.windows(start, self._num_rows)
        if buffer.device.type != "cpu":
            start = nest.to(start, buffer.device)
        if self._hindsight is not None:
            batch = self._hindsight.relabel(batch, start.column, start.position)
        before = self._transforms.window_state(buffer, start.column, start.position.clamp(min=0))
        if buffer.device != self._device:
            batch, before = nest.to((batch, before), self._device)
        experience = batch.experience._replace(transform_state=before)
        if algorithm.replay_needs.recurrent_state and experience.state is None:
            # Recorded data have no recurrent state, so windows begin with the initial state.
            empty = algorithm.initial_state(len(start.column))
            experience = experience._replace(state=nest.to(empty, self._device))
        return batch._replace(experience=experience)

    def update_priorities(self, start: SequenceIndex, priority: torch.Tensor) -> None:
        """Sets priorities `[N]` of windows. Non-finite priorities, which skipped updates have, are ignored."""
        if priority.device.type != "cpu":
            priority = torch.from_numpy(host.read(priority.float()))
        finite = torch.isfinite(priority)
        if not finite.all():
            start, priority = nest.map(lambda leaf: leaf[finite], (start, priority))
        self.sampler.update(start, priority)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the ring and of the sampler; for recorded data, a fingerprint instead of rows."""
        return {"data": self.buffer.state_dict(), "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state`.

        Raises:
          UsageError: the recorded data have changed.
        """
        self.buffer.load_state_dict(state["data"])
        self.sampler.load_state_dict(state["sampler"])


class SequenceBatches(Batches):
    """Base of sources that draw windows from one ring buffer, or from several at once.

    Args:
      window_length: number of rows of a window without burn-in; the last row does not train.
      burn_in: number of rows before the window from which only the recurrent state is computed.

    Attributes:
      window_length, burn_in: the constructor's arguments.
      num_rows: number of rows in a window, burn-in included.
    """

    on_policy = False

    def __init__(self, window_length: int, burn_in: int):
        self.window_length = window_length
        self.burn_in = burn_in
        self.num_rows = burn_in + window_length

    def bind(self, algorithm: RLAlgorithm, transforms: Transforms, unroll_length: float, num_envs: int) -> None:
        super().bind(algorithm, transforms, unroll_length, num_envs)
        self._on_cpu = algorithm.progress.device.type == "cpu"
        self._preprocesses = algorithm.overrides("preprocess_experience")
        if algorithm.replay_needs.return_gamma is not None and transforms.changes_rewards:
            raise UsageError(
                f"{type(algorithm).__name__} reads returns of the environment's rewards, but a transform changes the "
                "rewards; leave out the transform, or what reads returns (CalQL, values = @LowerBounded)"
            )
        if algorithm.replay_needs.recurrent_state and self.window_length < 3:
            raise UsageError(
                f"{type(self).__name__}.window_length is {self.window_length}, so only one row trains, but the memory "
                f"of {type(algorithm).__name__} learns across trainable rows; set window_length to 3 or more "
                "(dqn_recall.gin has 16)"
            )
        if self.burn_in and not algorithm.replay_needs.recurrent_state:
            raise UsageError(
                f"{type(self).__name__}.burn_in is {self.burn_in}, but {type(algorithm).__name__} has no memory that "
                "needs it; leave burn_in out, or give the network a memory"
            )

    def recorded(
        self,
        make_buffer: Callable[..., OfflineBuffer],
        sampler: Callable[[], Sampler],
        hindsight: Callable[[], HindsightReplay] | None,
        environment: Environment,
    ) -> tuple[OfflineBuffer, SequenceSampler]:
        """Reads recorded data, and updates the running statistics of transforms with all rows.

        Args:
          make_buffer: class or factory of the recorded data.
          sampler, hindsight: classes or factories, see `SequenceSampler`.
          environment: environment to train for; the data must have its spaces.

        Returns:
          The data and a sampler of their windows.

        Raises:
          UsageError: the data do not fit the environment's spaces, or lack an info that the algorithm trains on.
        """
        algorithm, needs = self.algorithm, self.algorithm.replay_needs
        if self.transforms.encoders:
            raise UsageError(
                f"{type(self.transforms.encoders[0]).__name__} encodes rows when they are collected, but recorded rows "
                "have raw observations; leave the transform out, and freeze the network's encoder with "
                "Learner.frozen_parts"
            )
        if needs.info:
            raise UsageError(
                f"{type(algorithm).__name__} trains on the info {', '.join(needs.info)} of its rollout_step, which "
                "recorded data lack; train on rows that the run collects, or turn off the setting that needs this info"
            )
        asked: dict[str, Any] = {} if hindsight is None else {"keeps_episodes": True}
        if needs.return_gamma is not None:
            asked["return_gamma"] = needs.return_gamma
        if "spaces" in parameter_names(make_buffer):  # with them, data without spaces or action masks get them
            asked["spaces"] = Spaces(environment.observation_space, environment.action_space)
        buffer = build(make_buffer, OfflineBuffer, "the buffer of recorded rows", **asked)
        buffer.check_spaces(environment.observation_space, environment.action_space)
        if algorithm.reward_weights is not None or not environment.reward_spec.shape:  # otherwise, rewards are not read
            buffer.check_rewards(sum(environment.reward_spec.shape))
        windows = SequenceSampler(buffer, sampler, hindsight, algorithm, self.transforms, self.num_rows, self.burn_in)
        windows.start(environment)
        with replicas.apart():  # no sums over learners, because all have the same data
            observe(self.transforms, buffer)
        return buffer, windows

    def _chunk(self, parts: list[tuple[SequenceSampler, int]], num_updates: int, for_graph: bool) -> Minibatches:
        """Draws the minibatches of K updates.

        Args:
          parts: samplers of rings, each with the number of its windows in an update.
          num_updates: number of updates, K.
          for_graph: whether updates are compiled, see `chunks`.
        """
        starts = [windows.draw(num_updates * count, num_updates) for windows, count in parts]
        update_priorities = None
        if [windows for windows, _ in parts if windows.sampler.uses_priorities]:
            update_priorities = functools.partial(_update_priorities, parts, starts)
        if for_graph and len(parts) == 1 and not self._preprocesses:
            stored = parts[0][0].in_place()
            if stored is not None:
                start = starts[0] if self._on_cpu else nest.to(starts[0], self.algorithm.progress.device)
                return Minibatches(stored, _cut(start, num_updates), update_priorities=update_priorities)
        batches = [windows.at(start) for (windows, _), start in zip(parts, starts)]
        batch = self._seen(batches[0] if len(batches) == 1 else _side_by_side(batches))
        if num_updates == 1:
            return Minibatches(batch, None, update_priorities=update_priorities)
        # The batch has all windows of the first ring, then all windows of the second ring. Each minibatch has windows
        # of both rings.
        device, index, before = batch.mask.device, [], 0
        for _, count in parts:
            own = torch.arange(before, before + num_updates * count, device=device)
            index.append(own.view(num_updates, count))
            before += num_updates * count
        return Minibatches(batch, torch.cat(index, 1), is_steady=False, update_priorities=update_priorities)

    def _seen(self, batch: Batch) -> Batch:
        """Applies transforms and `preprocess_experience` to windows, and removes the burn-in rows from the mask."""
        experience = self._prepare(batch.experience, self.burn_in)
        return batch._replace(experience=experience, mask=batch.mask[self.burn_in :])


def _cut(start: SequenceIndex, num_parts: int) -> list[SequenceIndex]:
    """Splits windows into parts of equal size, in order."""
    if num_parts == 1:
        return [start]
    leaves, structure = nest.flatten(start)
    parts = zip(*[leaf.view(num_parts, -1).unbind() for leaf in leaves])
    return [nest.unflatten(structure, part) for part in parts]


def _update_priorities(
    parts: list[tuple[SequenceSampler, int]], starts: list[SequenceIndex], priorities: list[torch.Tensor]
) -> None:
    """Sets the priorities `[N]` of each update's windows, in the rings from which the windows came.

    Args:
      parts: samplers and their numbers of windows, see `SequenceBatches._chunk`.
      starts: first rows of all updates' windows, for each ring.
      priorities: priorities of each update that was made. After a stop, there are fewer updates than in `starts`.
    """
    first, of_updates = 0, torch.stack(priorities)
    for (windows, count), start in zip(parts, starts, strict=True):
        own = of_updates[:, first : first + count].reshape(-1)
        if windows.sampler.uses_priorities:
            windows.update_priorities(nest.at(start, slice(len(own))), own)
        first += count


def observe(transforms: Transforms, buffer: RingBuffer) -> None:
    """Updates the statistics of transforms with all rows of a ring."""
    column = torch.arange(buffer.num_envs, device=buffer.device)
    oldest, newest = buffer.oldest_position(column), buffer.newest_position(column)
    for first in range(0, int((newest - oldest).max()) + 1, OBSERVED_ROWS):
        # Shorter columns are filled with their newest row as PAD, which statistics ignore.
        position = oldest + first + torch.arange(OBSERVED_ROWS, device=buffer.device).unsqueeze(1)
        time_step = buffer.read(column, torch.minimum(position, newest)).time_step
        kind = torch.where(position <= newest, time_step.step_type, StepType.PAD)
        before = transforms.window_state(buffer, column, torch.minimum(position[0], newest))
        transforms.observe(time_step._replace(step_type=kind), before, num_seen=0)


def _side_by_side(batches: list[Batch]) -> Batch:
    """Returns the windows of several rings as one batch."""
    if any(batch.weight is not None for batch in batches):
        ones = [torch.ones(batch.mask.shape[1], device=batch.mask.device) for batch in batches]
        batches = [b if b.weight is not None else b._replace(weight=one) for b, one in zip(batches, ones)]

    def apart(batch: Batch) -> tuple[Any, Any]:
        """Separates the leaves `[L, N, ...]` of a batch from its leaves `[N, ...]`."""
        experience = batch.experience
        rows = experience._replace(state=None, transform_state=None, policy_version=None), batch.mask
        return rows, (experience.state, experience.transform_state, batch.env_id, batch.position, batch.weight)

    rows, one_each = zip(*map(apart, batches))
    experience, mask = nest.map(lambda *leaves: torch.cat(leaves, 1), *rows)
    state, transform_state, env_id, position, weight = nest.map(lambda *leaves: torch.cat(leaves), *one_each)
    experience = experience._replace(state=state, transform_state=transform_state)
    return Batch(experience, mask, env_id, position, weight)
