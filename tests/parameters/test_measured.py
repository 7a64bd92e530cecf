"""Schedules that follow measured numbers: their values, and where they are refused."""

import math
import pickle

import numpy as np
import pytest
from gymnasium import spaces

from alfish import specs
from alfish.algorithms.ppo import PPO
from alfish.environments.games.teams import Teams
from alfish.errors import UsageError
from alfish.parameters.measured import Feedback, MeasuredLinear
from alfish.parameters.schedules import Cyclical
from alfish.replay import Prioritized
from alfish.training.reward_weights import ScheduledWeights

OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)


def linear(**arguments):
    return MeasuredLinear(scalar="evaluation/mean_return", **arguments)


@pytest.mark.parametrize("measured, value", [(-50.0, 1.0), (0.0, 1.0), (50.0, 0.75), (200.0, 0.0), (300.0, 0.0)])
def test_a_line_is_constant_before_and_after(measured, value):
    schedule = linear(start=1.0, finish=200.0)
    schedule.observe(measured)
    assert float(schedule(0.5)) == value


def test_a_line_may_fall_and_returns_with_its_number():
    schedule = linear(start=0.1, end=0.5, begin=100.0, finish=0.0)
    assert float(schedule(0.0)) == 0.1, "before the first measurement"
    schedule.observe(0.0)
    assert float(schedule(0.0)) == 0.5
    schedule.observe(100.0)
    assert float(schedule(0.0)) == 0.1


def test_feedback_changes_by_a_factor_within_its_limits():
    schedule = Feedback(scalar="train/entropy", target=1.0, initial=0.1, rate=-0.5, max_value=0.2)
    schedule.observe(1.0)
    assert float(schedule(0.0)) == pytest.approx(0.1)
    schedule.observe(0.5)  # below its target, so the value rises
    assert float(schedule(0.0)) == pytest.approx(0.1 * math.exp(0.25))
    schedule.observe(-1e9)
    assert float(schedule(0.0)) == 0.2
    schedule.observe(1e9)
    assert float(schedule(0.0)) == 1e-6


def test_scheduled_values_are_buffers_of_their_algorithm():
    schedule = linear(start=0.1, finish=1.0)
    algorithm = PPO(OBSERVATION, spaces.Discrete(3), specs.reward_spec(), entropy_coef=schedule)
    assert algorithm.state_dict()["_entropy_coef.value"].item() == pytest.approx(0.1)
    algorithm._entropy_coef.observe(1.0)
    assert schedule.value == pytest.approx(0.1)  # an algorithm has its own copy
    assert float(pickle.loads(pickle.dumps(algorithm))._entropy_coef(0.0)) == 0.0
    assert not list(schedule.parameters())


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda s: Prioritized(beta=s), "Prioritized.beta is a MeasuredLinear, but only settings of the algorithm"),
        (lambda s: Prioritized(alpha=s), "Prioritized.alpha is a MeasuredLinear"),
        (lambda s: Cyclical(s, 2), "Cyclical.schedule is a MeasuredLinear, which follows a measured number"),
        (lambda s: ScheduledWeights([s]), "ScheduledWeights.weights is a MeasuredLinear"),
        (lambda s: Teams({"a": ["x"]}, s, ["x"]), "make_games.team_spirit is a MeasuredLinear"),
    ],
)
def test_unlabelled_measurements_are_refused(make, sentence):
    with pytest.raises(UsageError, match=sentence):
        make(linear(start=1.0, finish=2.0))


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: linear(start=1.0, begin=2.0, finish=2.0), "are both 2.0; they must be different numbers"),
        (
            lambda: Feedback(scalar="x", target=0.0, initial=1.0, rate=1.0, max_value=0.5),
            "Feedback.initial is 1.0; it must lie between 1e-06 and 0.5",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(make, sentence):
    with pytest.raises(UsageError, match=sentence):
        make()
