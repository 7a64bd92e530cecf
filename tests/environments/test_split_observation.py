"""Observations that are split into named leaves."""

import pickle

import gin
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from toys import Stamped

from alfish.environments import make_environment
from alfish.environments.split_observation import SplitObservation
from alfish.errors import UsageError

SIZES = {"who": 1, "when": 2}


def test_concatenated_leaves_keep_the_observation_bounds():
    env = SplitObservation(gymnasium.make("Pendulum-v1"), {"zz": 2, "aa": 1})  # not in sorted order
    whole = env.env.observation_space
    assert env.observation_space == spaces.Dict(
        aa=spaces.Box(whole.low[2:], whole.high[2:]), zz=spaces.Box(whole.low[:2], whole.high[:2])
    )
    observation, _ = env.reset(seed=3)
    assert observation in env.observation_space
    expected, _ = env.env.reset(seed=3)
    np.testing.assert_array_equal(np.concatenate([observation["zz"], observation["aa"]]), expected)


@pytest.mark.parametrize("evaluation", [False, True])
def test_gin_puts_it_around_each_environment_in_training_and_evaluation(evaluation):
    gin.parse_config("make_environment.wrappers = [@SplitObservation]\nSplitObservation.sizes = {'who': 1, 'when': 2}")
    environment = make_environment(Stamped, num_envs=2, evaluation=evaluation)
    rows = environment.reset()
    assert {name: leaf.shape for name, leaf in rows.observation.items()} == {"who": (2, 1), "when": (2, 2)}
    rows = environment.step(np.zeros(2, np.int64))
    np.testing.assert_array_equal(rows.observation["when"], [[0, 1], [0, 1]])


def test_a_recorded_spec_rebuilds_the_environment():
    env = SplitObservation(gymnasium.make("CartPole-v1"), {"a": 3, "b": 1})
    again = gymnasium.make(pickle.loads(pickle.dumps(env.spec)))
    assert again.observation_space == env.observation_space
    wrapper = ["alfish.environments.split_observation:SplitObservation", {"sizes": SIZES}]
    assert set(make_environment(Stamped, wrappers=[wrapper]).observation_spec) == set(SIZES)


def test_sizes_that_do_not_fit_and_other_spaces_are_refused():
    with pytest.raises(UsageError, match=r"SplitObservation.sizes is .*4 entries in total, but the observation has 3"):
        SplitObservation(Stamped(), {"a": 1, "b": 3})
    with pytest.raises(UsageError, match="SplitObservation.sizes"):
        SplitObservation(Stamped(), {"a": 0, "b": 3})
    env = SplitObservation(Stamped(), SIZES)
    with pytest.raises(UsageError, match=r"splits a Box of shape \(n,\), but the observation is Dict"):
        SplitObservation(env, SIZES)
