"""RandomActions replaces a fraction of the actions, by the seed of the episode."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from alfish.__main__ import main
from alfish.environments.random_actions import RandomActions
from alfish.errors import UsageError


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
import alfish.environments.random_actions
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
