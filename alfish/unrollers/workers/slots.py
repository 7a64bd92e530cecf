"""Slots, shared memory for one segment each, and a ledger of the slots that are free, granted, ready and in use.

A worker writes a slot, and the trainer reads it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from alfish import nest, specs
from alfish.algorithms.acting import Actor, StatefulInfo
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Ends, Experience, StepType, TimeStep
from alfish.environments import Environment
from alfish.nest import Nest
from alfish.processes.messages import Segment
from alfish.runs import random_state
from alfish.transforms import Transforms
from alfish.unrollers.unroller import SHOWN_FIELDS, StepRecords, without_infos
from alfish.unrollers.workers.shared_tensors import Block, Form

# Rows and records of one policy in a segment. The rows are None if the policy does not train.
PolicyRows: TypeAlias = tuple[Experience | None, StepRecords]


class ActingPolicy(NamedTuple):
    """A policy that acts in workers, and its columns in a worker.

    Attributes:
      name: name of the policy; '' if it is the only one.
      environment: example of the environments of the policy. The example is not stepped, and may be closed.
      algorithm, transforms: networks of the policy.
      num_columns: number of the policy's columns in a worker.
      trains: whether the policy's rows are needed; if not, segments contain only its records.
      shown, stores_states: settings of the unroller, see `Unroller`.
    """

    name: str
    environment: Environment
    algorithm: RLAlgorithm
    transforms: Transforms
    num_columns: int
    trains: bool = True
    shown: Sequence[str] = ()
    stores_states: bool = False


class Slots:
    """All slots of a run, in one shared memory.

    Args:
      forms: shape and dtype of each leaf of a slot. For each policy, these are an `Experience` without its version,
        then `StepRecords` without infos; see `slot_forms`.
      count: number of slots.
      structure: structure of the experience and the records of all policies, from `nest.flatten`; only `read` needs it.
      fd: file descriptor of the memory, in a worker; None makes a new memory.
    """

    def __init__(self, forms: list[Form], count: int, structure: Any = None, fd: int | None = None):
        self._structure = structure
        self._block = Block(forms, count, fd)

    @property
    def fd(self) -> int:
        """File descriptor of the memory."""
        return self._block.memory.fd

    def write(self, slot: int, policies: Sequence[PolicyRows]) -> None:
        """Copies rows and records into a slot. Messages carry the version, infos and numbers of records."""
        targets = iter(self._block.copies[slot])
        for experience, records in policies:
            rows = () if experience is None else nest.leaves(experience._replace(policy_version=None))
            for leaf in rows:
                next(targets).copy_(nest.as_tensor(leaf))
            count = len(records.step_type)
            for leaf in nest.leaves(without_infos(records)):
                next(targets)[:count] = torch.from_numpy(leaf)
        assert next(targets, None) is None, "a segment lacks leaves of its slot"

    def read(self, segment: Segment) -> list[PolicyRows]:
        """Returns views of the rows and the records in a segment's slot, for each policy."""
        return rows_and_records(segment, self._structure, self._block.copies[segment.slot])


def rows_and_records(segment: Segment, structure: Any, leaves: Sequence[torch.Tensor]) -> list[PolicyRows]:
    """Returns the rows and the records of each policy, as views of the leaves of a segment's slot."""
    policies = zip(nest.unflatten(structure, leaves), segment.num_records, segment.infos, strict=True)
    found: list[PolicyRows] = []
    for (experience, records), count, infos in policies:
        if experience is not None:
            version = torch.full(experience.time_step.env_id.shape[1:], segment.version, dtype=torch.int64)
            experience = experience._replace(policy_version=version)
        records = nest.map(lambda leaf, count=count: leaf[:count].numpy(), records)._replace(infos=infos)
        found.append((experience, records))
    return found


def example_row(
    environment: Environment, algorithm: RLAlgorithm, transforms: Transforms, num_envs: int, stores_states: bool = False
) -> Experience:
    """Returns an Experience of one row `[B, ...]`: the policy's output for an observation of zeros.

    The environment is not stepped.
    """
    actor = Actor(algorithm, transforms)
    time_step = TimeStep(
        torch.full((num_envs,), StepType.FIRST, dtype=torch.int32),
        torch.zeros(num_envs, *transforms.raw_reward_spec.shape),
        torch.ones(num_envs),
        specs.zeros(environment.observation_spec, (num_envs,)),
        specs.zeros(environment.action_spec, (num_envs,)),
        torch.zeros(num_envs, dtype=torch.int32),
    )
    transform_state, state = actor.first_state(num_envs)
    with random_state.preserved():
        step, _ = actor.act(nest.to(time_step, actor.device), transform_state, state)
    actor.check(step, state, num_envs)
    info = StatefulInfo(step.info, state) if stores_states else step.info
    ends = Ends(torch.zeros(num_envs, dtype=torch.bool), time_step) if environment.uneven else None
    return Experience(time_step, step.output, info, state, None, transform_state, ends=ends)


def example_records(example: Experience, shown: Sequence[str]) -> StepRecords:
    """Returns StepRecords of one row `[B, ...]` with the fields in `shown`; infos is None."""
    step = example.time_step
    fields: dict[str, Any] = {name: getattr(step, SHOWN_FIELDS[name]) for name in shown}
    arrays: Any = step.step_type, step.reward, None
    return StepRecords(*arrays, **fields)


def slot_forms(
    example: Experience | None, records: StepRecords, num_rows: int, num_steps: int, num_records: int
) -> list[Form]:
    """Returns shape and dtype of each leaf of a policy's part of a slot.

    Args:
      example: example row `[B, ...]` of a segment; None if rows are not stored.
      records: records of the example row, from `example_records`.
      num_rows: number of rows of a segment.
      num_steps: number of vector steps of a segment.
      num_records: largest number S of records of a segment.
    """

    def forms(leaves: Nest, *leading: int) -> list[Form]:
        return [((*leading, *leaf.shape), leaf.dtype) for leaf in nest.leaves(leaves)]

    arrived = forms(records, num_records)
    if example is None:
        return arrived
    rows, starts = (example.time_step, example.action, example.info), (example.state, example.transform_state)
    return [*forms(rows, num_rows), *forms(starts), *forms(example.ends, num_steps), *arrived]


def slot_of(policies: Sequence[ActingPolicy], length: int) -> tuple[list[Form], Any]:
    """Returns shape and dtype of each leaf of a slot, and their structure; see `Slots`.

    Args:
      policies: policies that act in a worker.
      length: number of vector steps of a segment.
    """
    forms: list[Form] = []
    examples: list[PolicyRows] = []
    for one in policies:
        own = one.environment, one.algorithm, one.transforms, one.num_columns, one.stores_states
        example = example_row(*own)
        records = example_records(example, one.shown)
        num_records = 2 * length + 3 if one.environment.uneven else length + 1
        kept = example if one.trains else None
        forms += slot_forms(kept, records, length + one.algorithm.on_policy, length, num_records)
        examples.append((kept, records))
    return forms, nest.flatten(examples)[1]


class SlotLedger:
    """Tracks the state of every slot, and its segment.

        free -> granted (its worker writes it) -> ready (it holds a segment) -> in use (an iteration trains on it) ->
        free

    If a worker dies, its granted slots become free.

    Args:
      num_workers: number of workers.
      slots: number of slots of each worker. Worker i has the slots from `i * slots` on.

    Attributes:
      ready: segments that were not taken yet, in order of arrival.
      in_use: segments that the last unroll took and has not released.
    """

    def __init__(self, num_workers: int, slots: int):
        self.slots = slots
        self.ready: list[Segment] = []
        self.in_use: list[Segment] = []
        self._free = [list(range(i * slots, (i + 1) * slots)) for i in range(num_workers)]
        self._granted: list[set[int]] = [set() for _ in range(num_workers)]
        self._next_sequence = [0] * num_workers  # `Segment.sequence` of each worker's next segment

    def next_free(self, worker_index: int) -> int | None:
        """Returns the next slot to grant to a worker; None if the worker has no free slot."""
        free = self._free[worker_index]
        return free[-1] if free else None

    def is_idle(self, worker_index: int) -> bool:
        """Returns whether a worker has no granted slot and no ready segment."""
        return not self._granted[worker_index] and all(segment.worker_index != worker_index for segment in self.ready)

    def grant(self, worker_index: int) -> None:
        """Marks the slot `next_free` as granted."""
        self._granted[worker_index].add(self._free[worker_index].pop())

    def fill(self, segment: Segment) -> None:
        """Marks the segment's slot as ready."""
        worker_index = segment.worker_index
        assert segment.sequence == self._next_sequence[worker_index], "a segment was lost or duplicated"
        assert segment.slot in self._granted[worker_index], "a segment arrived in a slot that was not granted"
        self._next_sequence[worker_index] += 1
        self._granted[worker_index].remove(segment.slot)
        self.ready.append(segment)

    def take(self, most: int | None = None, most_of_each: int | None = None) -> list[Segment]:
        """Moves the oldest segments from ready to in use.

        Args:
          most: largest number of segments; None means all.
          most_of_each: largest number of segments of each worker; None means all.

        Returns:
          The segments, the oldest first.
        """
        taken: list[Segment] = []
        left: list[Segment] = []
        num_taken = Counter[int]()
        for segment in self.ready:
            is_taken = (most is None or len(taken) < most) and (
                most_of_each is None or num_taken[segment.worker_index] < most_of_each
            )
            num_taken[segment.worker_index] += is_taken
            (taken if is_taken else left).append(segment)
        self.ready = left
        self.in_use += taken
        return taken

    def release(self) -> None:
        """Marks all slots that are in use as free."""
        for segment in self.in_use:
            self._free[segment.worker_index].append(segment.slot)
        self.in_use = []

    def on_death(self, worker_index: int) -> None:
        """Marks the granted slots of a worker as free. The worker's finished segments are kept."""
        self._free[worker_index] = sorted([*self._free[worker_index], *self._granted[worker_index]])
        self._granted[worker_index].clear()
        self._next_sequence[worker_index] = 0

    def check_valid(self) -> None:
        """Asserts that each slot of a worker is in exactly one state."""
        for i, free in enumerate(self._free):
            held = [segment.slot for segment in (*self.ready, *self.in_use) if segment.worker_index == i]
            own = range(i * self.slots, (i + 1) * self.slots)
            assert sorted([*free, *self._granted[i], *held]) == list(own), (
                f"slots of worker {i} were lost or duplicated"
            )
