"""Optional wrappers: random actions by the seed of the episode, options of resets, names for parts of observations."""

import pickle

import gin
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from toys import Stamped

from alfish.__main__ import main
from alfish.environments import make_environment
from alfish.environments.optional_wrappers import RandomActions, ResetOptions, SplitObservation
from alfish.errors import UsageError
from alfish.offline.recorded_spaces import spaces_of


class Echo(gymnasium.Env):
    """Observes the action that was executed."""

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(10)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.array([action], np.float32), 0.0, False, False, {}


def executed(fraction, seed, count=2000):
    env = RandomActions(Echo(), fraction)
    env.reset(seed=seed)
    return np.array([env.step(3)[0][0] for _ in range(count)])


def test_the_fraction_of_actions_is_replaced_by_uniform_ones():
    assert (executed(0.0, 0) == 3).all()
    counts = np.bincount(executed(1.0, 0).astype(int), minlength=10)
    assert counts.min() > 150 and counts.max() < 250
    # A tenth of the random actions is the policy's own.
    assert (executed(0.2, 0) != 3).mean() == pytest.approx(0.9 * 0.2, abs=0.03)


def test_the_seed_of_the_episode_decides_which_actions():
    assert (executed(0.5, 7) == executed(0.5, 7)).all()
    assert (executed(0.5, 7) != executed(0.5, 8)).any()


def test_a_fraction_above_1_is_refused():
    with pytest.raises(UsageError, match="fraction"):
        RandomActions(Echo(), 1.5)


def test_random_actions_of_the_evaluation_environment_are_reproducible(tmp_path):
    conf = tmp_path / "conf.gin"
    conf.write_text(
        """
include 'dqn_cartpole.gin'
import alfish.environments.optional_wrappers
Trainer.evaluation_environment = @evaluation/make_environment
evaluation/make_environment.wrappers = [@RandomActions]
RandomActions.fraction = 0.5
Trainer.num_env_steps = 40
Trainer.listeners = [@CheckpointSaver(), @Evaluate()]
ReplayBatches.warmup_env_steps = 16
Evaluate.num_episodes = 4
MLP.layers = (8,)
Learner.compile = False
"""
    )
    texts = []
    for name in ("a", "b"):
        assert main(["train", f"--gin_file={conf}", f"--root_dir={tmp_path / name}"]) == 0
        (file,) = (tmp_path / name / "eval").glob("*.csv")
        texts.append(file.read_text())
    assert texts[0] == texts[1]


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
    wrapper = ["alfish.environments.optional_wrappers:SplitObservation", {"sizes": SIZES}]
    assert set(make_environment(Stamped, wrappers=[wrapper]).observation_spec) == set(SIZES)


def test_sizes_that_do_not_fit_and_other_spaces_are_refused():
    with pytest.raises(UsageError, match=r"SplitObservation.sizes is .*4 entries in total, but the observation has 3"):
        SplitObservation(Stamped(), {"a": 1, "b": 3})
    with pytest.raises(UsageError, match="SplitObservation.sizes"):
        SplitObservation(Stamped(), {"a": 0, "b": 3})
    env = SplitObservation(Stamped(), SIZES)
    with pytest.raises(UsageError, match=r"splits a Box of shape \(n,\), but the observation is Dict"):
        SplitObservation(env, SIZES)


class Scaled(Echo):
    """Observes the option `scale` of each reset in place of actions; observations are `size` numbers."""

    def __init__(self, size=1):
        self.observation_space = spaces.Box(0, 9, (size,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.scale = (options or {}).get("scale", 0)
        return np.full(self.observation_space.shape, self.scale, np.float32), {}

    def step(self, action):
        return np.full(self.observation_space.shape, self.scale, np.float32), 0.0, True, False, {}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_options_reach_every_reset(vectorization):
    wrapper = (ResetOptions, {"options": {"scale": 3}})
    environment = make_environment(Scaled, num_envs=2, wrappers=[wrapper], vectorization=vectorization)
    seen = [environment.reset().observation]
    seen += [environment.step(np.zeros(2, int)).observation for _ in range(4)]  # episodes of one step
    environment.close()
    assert (np.stack([np.asarray(one) for one in seen]) == 3).all()
    assert ResetOptions(Scaled(), {"scale": 3}).reset(options={"scale": 5})[0] == 5


def test_spaces_of_an_environment_with_arguments():
    assert spaces_of(Scaled, {"size": 4})[0].observation.shape == (4,)
