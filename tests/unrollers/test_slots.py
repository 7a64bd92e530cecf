"""The memory of segments: what a worker writes is what the trainer reads, and nothing beside it."""

import os

import numpy as np
import pytest
import torch
from toys import Stamped
from worker_parts import Remembering

from alfish import nest
from alfish.data import StepType
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.processes.messages import Seconds, Segment
from alfish.transforms import FrameStack, Transforms
from alfish.unrollers.unroller import StepRecords
from alfish.unrollers.workers.slots import Slots, example_records, example_row, slot_forms


class Guessing(Remembering):
    """Acts at random."""

    def rollout_step(self, time_step, state):
        return super().rollout_step(time_step, state)._replace(output=torch.randint(3, time_step.reward.shape))


def made_example():
    environment = make_environment(Stamped)
    transforms = Transforms([FrameStack], environment.observation_spec, environment.reward_spec)
    specs = transforms.observation_spec, environment.action_spec, environment.reward_spec
    return example_row(environment, Guessing(*specs), transforms, num_envs=2)


@pytest.fixture
def example():
    return made_example()


def test_an_example_takes_no_random_numbers_from_the_run():
    before = torch.get_rng_state()
    made_example()
    assert torch.equal(torch.get_rng_state(), before)


def test_an_example_has_what_the_policy_gives_and_raw_rows(example):
    assert example.time_step.step_type.tolist() == [StepType.FIRST] * 2
    assert example.time_step.observation.shape == (2, 3) and example.action.shape == (2,)
    assert example.info["memory"].shape == (2,) and example.state.shape == (2,)
    assert nest.leaves(example.transform_state) and example.policy_version is None


def test_a_wrong_rollout_step_is_named_before_a_worker_starts():
    class Bare(Remembering):
        def rollout_step(self, time_step, state):
            return super().rollout_step(time_step, state).output

    environment = make_environment(Stamped)
    transforms = Transforms([], environment.observation_spec, environment.reward_spec)
    algorithm = Bare(environment.observation_spec, environment.action_spec, environment.reward_spec)
    with pytest.raises(UsageError, match="rollout_step of Bare returned a tensor .* it must return AlgStep"):
        example_row(environment, algorithm, transforms, num_envs=2)


def test_slots_are_read_in_place_without_changing_others(example):
    of_arrivals = example_records(example, ("action",))
    forms = slot_forms(example, of_arrivals, num_rows=4, num_steps=4, num_records=6)
    slots = Slots(forms, 3, nest.flatten([(example, of_arrivals)])[1])
    workers = Slots(forms, 3, fd=os.dup(slots.fd))

    def filled(leaf, leading=(4,)):
        return (torch.rand(*leading, *leaf.shape) * 100).to(leaf.dtype)

    rows = nest.map(filled, example._replace(state=None, transform_state=None))
    starts = nest.map(lambda leaf: filled(leaf, ()), (example.state, example.transform_state))
    experience = rows._replace(state=starts[0], transform_state=starts[1], policy_version=torch.tensor([8, 8]))
    infos = [(2, {"count": np.arange(2)})]
    records = StepRecords(np.ones((5, 2), np.int32), np.full((5, 2), 0.5, np.float32), infos, action=np.full((5, 2), 2))
    workers.write(1, [(experience, records)])

    def read(slot, num_records=5):
        return slots.read(Segment(0, slot, 0, 8, [num_records], [infos], Seconds(0, 0, 0, 0)))[0]

    found, arrived = read(1)
    assert nest.flatten(found)[1] == nest.flatten(experience)[1]
    assert all(map(torch.equal, nest.leaves(found), nest.leaves(experience)))
    assert (arrived.step_type == records.step_type).all() and (arrived.reward == records.reward).all()
    assert (arrived.action == 2).all() and arrived.action.shape == (5, 2) and arrived.observation is None
    assert arrived.infos is infos and len(read(1, num_records=3)[1].reward) == 3
    for other in (0, 2):
        assert not any(leaf.any() for leaf in nest.leaves(read(other)[0]._replace(policy_version=None)))
    found.action.fill_(2)
    assert (read(1)[0].action == 2).all()
