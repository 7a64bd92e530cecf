"""Slots: shared memory that holds one segment each. A worker writes a slot, and the trainer reads it."""

from collections.abc import Sequence
from typing import Any

import torch

from alfish import nest, specs
from alfish.algorithms.acting import StatefulInfo
from alfish.algorithms.contract import check_step
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience, StepType, TimeStep
from alfish.environments import Environment
from alfish.processes.messages import Segment
from alfish.runs import random_state
from alfish.transforms import Transforms
from alfish.unrollers.unroller import SHOWN_FIELDS, StepRecords, without_infos
from alfish.unrollers.workers.shared_tensors import Block, Form


class Slots:
    """All slots of a run, in one shared memory.

    Args:
      forms: shape and dtype of each leaf of a slot: an `Experience` without its version, then `StepRecords` without
        infos; see `slot_forms`.
      count: number of slots.
      structure: of these two, from `nest.flatten`; `read` needs it.
      fd: descriptor of the memory, in a worker; None: makes a new memory.
    """

    def __init__(self, forms: list[Form], count: int, structure: Any = None, fd: int | None = None):
        self._structure = structure
        self._block = Block(forms, count, fd)

    @property
    def fd(self) -> int:
        """Descriptor of the memory."""
        return self._block.memory.fd

    def write(self, slot: int, experience: Experience, records: StepRecords) -> None:
        """Copies rows and records into a slot. Version, infos and the number of records go by message."""
        rows, arrived = (
            nest.leaves(experience._replace(policy_version=None)),
            nest.leaves(without_infos(records)),
        )
        targets, count = iter(self._block.copies[slot]), len(records.step_type)
        for leaf, target in zip(rows, targets):
            target.copy_(nest.as_tensor(leaf))
        for leaf, target in zip(arrived, targets, strict=True):
            target[:count] = torch.from_numpy(leaf)

    def read(self, segment: Segment) -> tuple[Experience, StepRecords]:
        """Returns views of the rows and the records in a segment's slot."""
        return rows_and_records(segment, self._structure, self._block.copies[segment.slot])


def rows_and_records(
    segment: Segment, structure: Any, leaves: Sequence[torch.Tensor]
) -> tuple[Experience, StepRecords]:
    """Returns the rows and the records of a segment from the leaves of its slot. Both are views of the leaves."""
    experience, records = nest.unflatten(structure, leaves)
    version = torch.full(experience.time_step.env_id.shape[1:], segment.version, dtype=torch.int64)
    records = nest.map(lambda leaf: leaf[: segment.num_records].numpy(), records)._replace(infos=segment.infos)
    return experience._replace(policy_version=version), records


def example_row(
    environment: Environment, algorithm: RLAlgorithm, transforms: Transforms, num_envs: int, stores_states: bool = False
) -> Experience:
    """Returns an Experience of one row `[B, ...]` with the policy's output for zeros. Steps no environment."""
    device = algorithm.progress.device
    time_step = TimeStep(
        torch.full((num_envs,), StepType.FIRST, dtype=torch.int32),
        torch.zeros(num_envs, *transforms.raw_reward_spec.shape),
        torch.ones(num_envs),
        specs.zeros(environment.observation_spec, (num_envs,)),
        specs.zeros(environment.action_spec, (num_envs,)),
        torch.zeros(num_envs, dtype=torch.int32),
    )
    state, transform_state = algorithm.initial_state(num_envs), transforms.initial_state(num_envs)
    row, here, before = nest.to((time_step, state, transform_state), device)
    with random_state.preserved():
        seen, _ = transforms(row, before)
        step = algorithm.rollout_step(seen, here)
    check_step(step, algorithm, "rollout_step", environment.action_spec, num_envs, here)
    info = StatefulInfo(step.info, state) if stores_states else step.info
    return Experience(time_step, step.output, info, state, None, transform_state)


def example_records(example: Experience, shown: Sequence[str]) -> StepRecords:
    """Returns StepRecords of one row `[B, ...]` with the fields in `shown`; infos is None."""
    step = example.time_step
    fields: dict[str, Any] = {name: getattr(step, SHOWN_FIELDS[name]) for name in shown}
    arrays: Any = step.step_type, step.reward, None
    return StepRecords(*arrays, **fields)


def slot_forms(example: Experience, records: StepRecords, num_rows: int, num_records: int) -> list[Form]:
    """Returns shape and dtype of each leaf of a slot.

    Args:
      example: one row `[B, ...]` of a segment.
      records: `example_records` of that row.
      num_rows: rows of a segment.
      num_records: largest number S of its records.
    """
    rows, starts = (example.time_step, example.action, example.info), (example.state, example.transform_state)
    return [
        *(((num_rows, *leaf.shape), leaf.dtype) for leaf in nest.leaves(rows)),
        *((tuple(leaf.shape), leaf.dtype) for leaf in nest.leaves(starts)),
        *(((num_records, *leaf.shape), leaf.dtype) for leaf in nest.leaves(records)),
    ]


def slot_of(
    environment: Environment,
    algorithm: RLAlgorithm,
    transforms: Transforms,
    num_envs: int,
    length: int,
    shown: Sequence[str],
    stores_states: bool = False,
) -> tuple[list[Form], Any]:
    """Returns shape and dtype of each leaf of a slot, and their structure; see `Slots`.

    Args:
      environment: of the worker. It is not stepped, and may be closed.
      algorithm, transforms: the policy.
      num_envs: environments of a worker.
      length: rows of a segment, besides the last one of a previous segment.
      shown, stores_states: see `Unroller`.
    """
    example = example_row(environment, algorithm, transforms, num_envs, stores_states)
    records = example_records(example, shown)
    num_rows = length + (1 if algorithm.on_policy or environment.uneven else 0)
    num_records = 2 * length + 3 if environment.uneven else length + 1
    _, structure = nest.flatten((example, records))
    return slot_forms(example, records, num_rows, num_records), structure
