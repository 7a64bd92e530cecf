"""The cut of stragglers: no row is lost or doubled, returns at the cut are exact, and only real rows are counted."""

import contextlib
import functools

import numpy as np
import pytest
import torch
from scripted import (
    DISABLED,
    LENGTHS,
    NEXT_STEP,
    SAME_STEP,
    Scripted,
    ScriptedOffPolicy,
    real_rows,
    recorded,
    transitions,
    unroll,
)

from alfish import nest
from alfish.algorithms.ppo import PPO
from alfish.data import IS_STEP, in_line, trainable
from alfish.environments import TensorEnvironment
from alfish.environments.toy import TensorPointMass
from alfish.errors import UsageError
from alfish.networks import LSTM, ActorCritic, Torso
from alfish.processes import replicas
from alfish.transforms import FrameStack, Transforms
from alfish.unrollers import SyncUnroller

MODES = [NEXT_STEP, SAME_STEP, DISABLED]


class Learners:
    """Two learners, of which this process is the second; the first one has finished when it was asked often enough."""

    rank, size, num_counters = 1, 2, 0
    reaching = staticmethod(contextlib.nullcontext)

    def __init__(self):
        self.store, self.patience, self._num_asked, self._num_unrolls = self, 0, 0, 0

    def add(self, key, amount):
        if amount:
            self._num_unrolls, self._num_asked = self._num_unrolls + 1, 0
            return 2 * self._num_unrolls
        self._num_asked += 1
        return 2 * self._num_unrolls + (self._num_asked > self.patience)


@pytest.fixture(autouse=True)
def learners(monkeypatch):
    group = Learners()
    monkeypatch.setattr(replicas, "_group", group)
    return group


def unroller_of(environment, algorithm=Scripted, fraction=0.5, factories=(), numpy_policy=None):
    transforms = Transforms(factories, environment.observation_spec, environment.reward_spec)
    torch.manual_seed(0)
    made = algorithm(transforms.observation_spec, environment.action_spec, environment.reward_spec)
    return SyncUnroller(environment, made, transforms, numpy_policy, sync_fraction=fraction)


@pytest.mark.parametrize("mode", MODES)
def test_unrolls_that_are_cut_anywhere_have_every_transition_once(learners, mode):
    environment = recorded(mode)
    unroller = unroller_of(environment)
    trained, num_steps, generator = [[] for _ in LENGTHS], 0, np.random.default_rng(0)
    for _ in range(12):
        learners.patience = int(generator.integers(0, 9))
        unrolled = nest.tensors(unroller.unroll(8))
        num_steps += int(IS_STEP[unroller.records.step_type].sum())
        assert unrolled.time_step.step_type.shape == (9, 3), "a graph has one shape"
        assert unrolled.ends is None or unrolled.ends.ended.shape == (8, 3)
        experience = in_line(unrolled).experience
        for column, found in enumerate(trained):
            assert real_rows(experience, column) >= 3  # a quarter of the unroll, and the row after it
            found += transitions(experience, column)
    for found, env in zip(trained, environment.env.envs):
        assert found == env.record and len(found) > 20
    assert num_steps == sum(len(env.record) for env in environment.env.envs), "clocks count steps that were made"


@pytest.mark.parametrize("patience", [0, 1, 5, 9])
def test_an_unroll_is_not_cut_before_a_quarter_of_it(learners, patience):
    learners.patience = patience
    experience = unroll(unroller_of(recorded(NEXT_STEP)), 8)
    assert real_rows(experience, 0) == min(2 + patience, 8) + 1


def memory(*arguments):
    torso = functools.partial(Torso, memory=functools.partial(LSTM, size=4))
    return PPO(*arguments, network=functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso))


def point_mass():
    return TensorEnvironment(TensorPointMass(3, length=5), seed=0)


@pytest.mark.parametrize("numpy_policy", [None, 0])
@pytest.mark.parametrize("algorithm", [PPO, memory])
@pytest.mark.parametrize("environment", [point_mass, functools.partial(recorded, NEXT_STEP)])
@pytest.mark.parametrize("factories", [(), (functools.partial(FrameStack, num_frames=2),)])
def test_advantages_of_a_cut_unroll_equal_those_of_a_shorter_unroll(
    learners, environment, algorithm, factories, numpy_policy
):
    learners.patience = 2
    cut = unroller_of(environment(), algorithm, 0.5, factories, numpy_policy)
    short = unroller_of(environment(), algorithm, None, factories, numpy_policy)
    for k in range(3):  # also with what the cut unroll leaves to the next one
        found = []
        for unroller, length in ((cut, 8), (short, 4)):
            torch.manual_seed(k)
            rows = nest.tensors(unroller.unroll(length))
            seen = unroller._transforms.transform(rows.time_step, rows.transform_state)
            with torch.no_grad():
                advantage, value = unroller._algorithm.advantage_and_value(rows._replace(time_step=seen))
            found.append((advantage, value, trainable(rows.time_step.step_type), rows.action))
        (advantage, value, trains, action), (other, other_value, other_trains, other_action) = found
        assert torch.equal(trains[:4], other_trains) and not trains[4:].any()
        assert torch.equal(action[:4], other_action[:4])
        torch.testing.assert_close(advantage[:4][other_trains], other[other_trains])
        torch.testing.assert_close(value[:5], other_value)  # of the row after the cut, too


def test_advantages_at_the_cut_follow_the_definition(learners):
    learners.patience = 1
    unroller = unroller_of(point_mass(), functools.partial(PPO, gamma=0.9, lambda_=0.8))
    for _ in range(4):
        rows = nest.tensors(unroller.unroll(8))
        with torch.no_grad():
            advantage, value = unroller._algorithm.advantage_and_value(rows)
        step = rows.time_step
        for column in range(3):
            expected, num_rows = 0.0, real_rows(rows, column)
            assert num_rows == 4
            for t in reversed(range(num_rows - 1)):
                if not trainable(step.step_type)[t, column]:
                    expected = 0.0
                    continue
                g = 0.9 * step.discount[t + 1, column]
                delta = step.reward[t + 1, column] + g * value[t + 1, column] - value[t, column]
                expected = delta + g * 0.8 * expected
                torch.testing.assert_close(advantage[t, column], expected)


class TestRefusals:
    @pytest.mark.parametrize(
        "size, fraction, message",
        [
            (1, 0.5, "SyncUnroller.sync_fraction is 0.5, but there is only one learner"),
            (2, 0.6, "would let all 2 learners finish; set it to at most 0.5"),
            (3, 0.67, "would let all 3 learners finish; set it to at most 0.66"),
        ],
    )
    def test_learners_that_would_never_be_cut_are_refused(self, learners, monkeypatch, size, fraction, message):
        monkeypatch.setattr(replicas, "_group", learners if size > 1 else None)
        learners.size = size
        unroller = unroller_of(recorded(NEXT_STEP), fraction=fraction)
        with pytest.raises(UsageError, match=message):
            unroller.check_learners()

    @pytest.mark.parametrize("size, fraction", [(2, 0.5), (3, 0.66), (10, 0.7), (8, 0.6)])
    def test_others_are_not(self, learners, size, fraction):
        learners.size = size
        unroller_of(recorded(NEXT_STEP), fraction=fraction).check_learners()

    def test_an_off_policy_algorithm_is_refused(self):
        with pytest.raises(UsageError, match="ScriptedOffPolicy is off-policy"):
            unroller_of(recorded(NEXT_STEP), ScriptedOffPolicy)
