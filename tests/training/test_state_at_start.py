"""What a run needs at its first checkpoint, and to be resumed, is tried out in its first iteration."""

import functools

import numpy as np
import pytest
from gymnasium import spaces
from test_resume import make

from alfish import specs
from alfish.algorithms.ddpg import DDPG
from alfish.environments.toy import TensorPointMass
from alfish.errors import RunError, UsageError
from alfish.learner.batches import ReplayBatches
from alfish.replay import Uniform
from alfish.training.listeners import CheckpointSaver
from alfish.transforms import ObservationNormalizer
from alfish.transforms.transform import Transforms


class Forgets(ObservationNormalizer):
    """Cannot read what it has saved."""

    def get_extra_state(self):
        return {"count": 3}

    def set_extra_state(self, state):
        self.count = state["counts"]


class Empties(ObservationNormalizer):
    """Writes to the list that it has given away."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.seen = [1, 2]

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen.clear()
        self.seen += state


class Arrays(ObservationNormalizer):
    def get_extra_state(self):
        return np.zeros(2)

    def set_extra_state(self, state):
        pass


class ArraySampler(Uniform):
    def state_dict(self):
        return {"drawn": np.zeros(2)}


def run_of(tmp_path, transform, **options):
    listeners = [CheckpointSaver(10**9)]
    return make(
        tmp_path / "run", TensorPointMass, {"length": 6}, 8, transforms=[transform], listeners=listeners, **options
    )


def test_a_transform_that_cannot_load_its_state_ends_the_first_iteration(tmp_path):
    trainer = run_of(tmp_path, Forgets)
    with pytest.raises(
        RunError, match=r"^load_state_dict of the transforms raised KeyError: 'counts' .*set_extra_state"
    ):
        trainer.train()
    assert trainer.clock.iterations == 1


def test_a_transform_with_unsaveable_state_ends_the_first_iteration(tmp_path):
    trainer = run_of(tmp_path, Arrays)
    with pytest.raises(UsageError, match=r"leaf 'transforms.*_extra_state' is a numpy.ndarray"):
        trainer.train()
    assert trainer.clock.iterations == 1


def test_trying_out_changes_no_state(tmp_path):
    trainer = run_of(tmp_path, Empties, num_iterations=2)
    trainer.train()
    assert trainer.transforms.others[0].seen == [1, 2]


def test_a_sampler_with_unsaveable_state_ends_the_first_iteration(tmp_path):
    batches = functools.partial(ReplayBatches, capacity=1000, batch_size=8, sampler=ArraySampler, warmup_env_steps=8)
    trainer = run_of(tmp_path, ObservationNormalizer, algorithm=DDPG, batches=batches)
    with pytest.raises(UsageError, match=r"leaf 'replay.sampler.drawn' is a numpy.ndarray"):
        trainer.train()
    assert trainer.clock.iterations == 1


def test_a_transform_with_a_method_that_torch_does_not_call_is_refused():
    class Loads(ObservationNormalizer):
        def load_state_dict(self, state):
            pass

    spec = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    with pytest.raises(UsageError, match="Loads defines load_state_dict, which torch does not call"):
        Transforms([Loads], spec, specs.reward_spec())
