"""Vector rewards of environments: declared by the environment, named, or taken from infos."""

import pickle
import re

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from toys import OneState

from alfish import specs
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.offline.recorded_spaces import TrainedSpaces, spaces_by_policy


class TwoGoals(OneState):
    """Reward 1 and 2 in each step, and their sum as an info."""

    reward_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def step(self, action):
        observation, reward, *ends, info = super().step(action)
        return observation, np.float32([reward, 2.0]), *ends, {**info, "both": 3.0, "word": "none"}


class Forgetful(TwoGoals):
    def step(self, action):
        observation, reward, *ends, _ = super().step(action)
        return observation, reward[:1], *ends, {}


class LinearReward(gymnasium.Wrapper):
    """Adds the entries up and declares nothing, as that of mo-gymnasium."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, float(reward.sum()), *rest


def steps(num_steps=1, env=TwoGoals, **settings):
    environment = make_environment(env, 2, env_kwargs={"length": 2}, **settings)
    rewards = [environment.reset().reward]
    for _ in range(num_steps):
        rewards.append(environment.step(np.zeros(2, np.int64)).reward)
    environment.close()
    return environment.reward_spec, np.array(rewards)


def test_declared_vector_rewards_are_row_rewards():
    reward_spec, rewards = steps(3)
    assert specs.reward_names(reward_spec) == ("0", "1") and rewards.dtype == np.float32
    assert rewards[:, 0].tolist() == [[0, 0], [1, 2], [1, 2], [0, 0]]  # the last is FIRST


def test_entries_are_named():
    assert steps(rewards=["score", "time"])[0].names == ("score", "time")


def test_reward_entries_come_from_infos_the_reward_or_its_entries():
    reward_spec, rewards = steps(rewards={"sum": "info:both", "second": "reward:1"})
    assert reward_spec.names == ("sum", "second") and rewards[1, 0].tolist() == [3, 2]
    _, rewards = steps(env=OneState, rewards={"score": "reward"})
    assert rewards[:, 0].tolist() == [[0], [1]]


@pytest.mark.parametrize(("reward", "shape"), [(1.0, "()"), (np.ones(1), "(1,)"), (np.ones(3), "(3,)")], ids=str)
def test_an_entry_of_a_reward_of_another_shape_than_declared_is_refused(reward, shape):
    class Changed(TwoGoals):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, reward, *rest

    with pytest.raises(
        UsageError, match=re.escape(f"returned a reward of shape {shape}, but the environment declared (2,)")
    ):
        steps(env=Changed, rewards={"second": "reward:1"})


def test_a_summing_wrapper_makes_a_scalar_reward():
    reward_spec, rewards = steps(wrappers=[LinearReward])
    assert reward_spec.shape == () and rewards[1].tolist() == [3, 3]


@pytest.mark.parametrize(("settings", "words"), [
    ({"rewards": ["score"]}, "rewards names 1 entries, but the environment's reward has 2 entries"),
    ({"rewards": ["score", "n"]}, "each entry needs a unique name, without '/' and other than n and nonfinite"),
    ({"rewards": ["score", "score"]}, "each entry needs a unique name"),
    ({"rewards": {"score": "reward:2"}}, "'reward:2' is not one of the 2 entries of the environment's reward"),
    ({"rewards": {"score": "both"}}, "'both' is not a source of a reward; write 'info:KEY', 'reward', or 'reward:1'"),
    ({"rewards": {"score": "info:other"}}, "'info:other' was missing after a step"),
    ({"rewards": {"score": "info:word"}}, "'info:word' was 'none', which is not a number after a step"),
    ({"vectorization": "async"}, "only scalar rewards, but the environment's reward is a vector; use 'sync'"),
    ({"env": OneState, "rewards": ["score"]}, "the environment's reward is a scalar: it has no reward_space"),
    ({"env": Forgetful}, r"a step returned a reward of shape \(1,\), but the environment declared \(2,\)"),
])  # fmt: skip
def test_rewards_that_do_not_fit_are_refused_in_one_sentence(settings, words):
    with pytest.raises(UsageError, match=words):
        steps(**settings)


def test_names_survive_pickling_and_checkpoints():
    reward_spec = specs.reward_spec(["score", "time"])
    copy = pickle.loads(pickle.dumps(reward_spec))
    assert copy.names == reward_spec.names and copy == reward_spec != specs.reward_spec(2)
    space = spaces.Discrete(2)
    saved = TrainedSpaces(space, space, reward_spec).to_json()
    assert spaces_by_policy({"spaces": saved})[""].reward.names == ("score", "time")
    del saved["reward_names"]  # an older checkpoint
    assert spaces_by_policy({"spaces": saved})[""].reward.names == ("0", "1")
