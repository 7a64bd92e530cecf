"""The memory of segments: each slot holds one, where its worker writes it and the trainer reads it."""

from typing import Any, TypeAlias

import torch

from alfish import nest, random_state, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience, StepType, TimeStep
from alfish.environments import Environment
from alfish.transforms import Transforms
from alfish.unrollers.messages import Segment
from alfish.unrollers.shared import Block
from alfish.unrollers.unroller import Arrivals

Form: TypeAlias = tuple[tuple[int, ...], torch.dtype]


class Slots:
    """Slots side by side in one shared memory.

    Args:
      forms: shape and dtype of what is in a slot: an `Experience` without its version, then step types and rewards of
        `Arrivals`; see `slot_forms`.
      count: slots.
      structure: of the `Experience`, as `nest.flatten` gives it, for `read`.
      fd: of the memory, in a worker; None: make it.
    """

    def __init__(self, forms: list[Form], count: int, structure: Any = None, fd: int | None = None):
        self._structure = structure
        self._block = Block(forms, count, fd)

    @property
    def fd(self) -> int:
        """Descriptor of the memory, for a worker to inherit."""
        return self._block.memory.fd

    def write(self, slot: int, experience: Experience, arrivals: Arrivals) -> None:
        """Copies rows and what arrived into a slot; versions, infos and the number of arrivals go by message."""
        *targets, step_type, reward = self._block.copies[slot]
        for target, leaf in zip(targets, nest.leaves(experience._replace(policy_version=None)), strict=True):
            target.copy_(leaf)
        count = len(arrivals.step_type)
        step_type[:count] = torch.from_numpy(arrivals.step_type)
        reward[:count] = torch.from_numpy(arrivals.reward)

    def read(self, segment: Segment) -> tuple[Experience, Arrivals]:
        """The rows in a segment's slot, and what arrived: not a copy."""
        *leaves, step_type, reward = self._block.copies[segment.slot]
        experience: Experience = nest.unflatten(self._structure, leaves)
        version = torch.full(experience.time_step.env_id.shape[1:], segment.version, dtype=torch.int64)
        count = segment.num_arrivals
        arrivals = Arrivals(step_type[:count].numpy(), reward[:count].numpy(), segment.infos)
        return experience._replace(policy_version=version), arrivals


def example_row(environment: Environment, algorithm: RLAlgorithm, transforms: Transforms, num_envs: int) -> Experience:
    """An Experience of one row `[B, ...]` as the policy makes it; zeros apart from that, and nothing is stepped."""
    device = algorithm.progress.device
    time_step = TimeStep(
        torch.full((num_envs,), StepType.FIRST, dtype=torch.int32),
        torch.zeros(num_envs, *algorithm.reward_spec.shape),
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
    return Experience(time_step, step.output, step.info, state, None, transform_state)


def slot_forms(example: Experience, num_rows: int, num_arrivals: int) -> list[Form]:
    """Shapes and dtypes of a slot for segments of `num_rows` rows, the row of `example` being one of them."""
    rows, starts = (example.time_step, example.action, example.info), (example.state, example.transform_state)
    step_type, reward = example.time_step.step_type, example.time_step.reward
    return [
        *(((num_rows, *leaf.shape), leaf.dtype) for leaf in nest.leaves(rows)),
        *((tuple(leaf.shape), leaf.dtype) for leaf in nest.leaves(starts)),
        *(((num_arrivals, *leaf.shape), leaf.dtype) for leaf in (step_type, reward)),
    ]
