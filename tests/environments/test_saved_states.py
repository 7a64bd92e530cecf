"""What a checkpoint takes from an environment: its random generators, and its state where it has one."""

import random

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from toys import OneState

from alfish import nest
from alfish.data import StepType
from alfish.environments import make_environment
from alfish.environments.toy import TensorPointMass
from alfish.errors import UsageError


class Drawing(OneState):
    """Draws its episodes from a generator of a kind that the caller chooses."""

    make = staticmethod(np.random.RandomState)

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(-10, 10, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        if seed is not None or self._np_random is None:
            self.np_random = self.make(seed)
        super().reset()
        return self._drawn(), {}

    def step(self, action):
        _, *rest = super().step(action)
        return self._drawn(), *rest

    def _drawn(self):
        one = self.np_random.normal() if hasattr(self.np_random, "normal") else self.np_random.gauss(0, 1)
        return np.array([np.clip(one, -10, 10), 0], np.float32)


def drawing(make):
    return type("Drawing", (Drawing,), {"make": staticmethod(make)})


def following(environment, count=12):
    return [environment.step(np.zeros(2, np.int64)).observation for _ in range(count)]


KINDS = [np.random.RandomState] + [
    lambda seed, bits=bits: np.random.Generator(bits(seed))
    for bits in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
]


@pytest.mark.parametrize("make", KINDS, ids=["RandomState", "PCG64", "MT19937", "Philox", "SFC64"])
def test_a_generator_of_each_kind_continues_where_it_was_saved(make):
    first, second = (make_environment(drawing(make), num_envs=2, seed=seed) for seed in (3, 4))
    first.reset()
    following(first, 5)
    state = first.state_dict()
    assert len(state["generators"]) == 2
    assert not second.load_state_dict(state)  # the episodes begin anew
    first.load_state_dict(state)
    for one, other in zip(following(first), following(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_unsaveable_generators_give_new_episodes_after_a_resume():
    first = make_environment(drawing(random.Random), num_envs=2, seed=3)
    begun = first.reset().observation
    state = first.state_dict()
    assert state["generators"] == []
    np.random.seed(5)
    first.load_state_dict(state)
    assert not np.array_equal(following(first, 1)[0], begun)


class Stating(VectorEnv):
    """A numpy vector class whose state has leaves that the caller chooses."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_observation_space, single_action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def __init__(self, num_envs, leaf):
        self.num_envs, self._leaf = num_envs, leaf
        self.observation_space = spaces.Box(-1, 1, (num_envs, 1))
        self.action_space = spaces.MultiDiscrete([2] * num_envs)

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 1), np.float32), {}

    def get_state(self):
        return {"physics": {"bodies": self._leaf}}

    def set_state(self, state):
        pass


@pytest.mark.parametrize("leaf", [np.zeros(2), {1, 2}, np.float64(1)])
def test_a_state_that_a_checkpoint_cannot_hold_is_refused_at_the_first_reset(leaf):
    words = rf"leaf 'Stating.get_state\(\).physics.bodies' is a .*{type(leaf).__name__}"
    with pytest.raises(UsageError, match=words):
        make_environment(Stating, num_envs=2, env_kwargs={"leaf": leaf}).reset()
    make_environment(Stating, num_envs=2, env_kwargs={"leaf": torch.zeros(2)}).reset()

    class Own(TensorPointMass):
        def get_state(self):
            return {"leaf": leaf}

    with pytest.raises(UsageError, match=rf"leaf 'Own.get_state\(\).leaf' is a .*{type(leaf).__name__}"):
        make_environment(Own, num_envs=2).reset()


def test_single_environments_receive_only_given_options():
    given = []

    class Noting(OneState):
        def reset(self, *, seed=None, options=None):
            given.append(options)
            return super().reset(seed=seed)

    environment = make_environment(Noting, num_envs=2, evaluation=True)
    environment.reset([1, 2])
    environment.reset([3, None], np.array([True, False]))
    assert given == [None] * 3
    assert nest.leaves(environment.reset([1, 2]).observation)


class OwnGenerator(gymnasium.Env):
    """Draws its first observations from a generator that it makes itself, and that a checkpoint cannot hold."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._own = np.random.default_rng(seed)
        return self._own.random(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, {}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_resumed_environment_does_not_repeat_the_episodes_of_its_beginning(vectorization):
    def beginnings(environment, count):
        rows = [environment.step(np.zeros(2, np.int64)) for _ in range(2 * count)]
        return [row.observation[0].item() for row in rows if row.step_type[0] == StepType.FIRST]

    def made():
        return make_environment(OwnGenerator, 2, vectorization=vectorization, seed=3)

    environment = made()
    environment.reset()
    found = beginnings(environment, 6)
    state = environment.state_dict()
    environment.close()
    found_later = []
    for _ in range(2):
        resumed = made()
        assert not resumed.load_state_dict(state)
        found_later.append(beginnings(resumed, 6))
        resumed.close()
    assert not set(found) & set(found_later[0])
    assert found_later[0] == found_later[1]  # a resumed run is reproducible


def test_groups_of_environments_resume_with_different_seeds():
    first, second = (make_environment(OwnGenerator, 2, seed=seed) for seed in (3, 4))
    for environment in (first, second):
        environment.reset()
    assert first.state_dict()["seeds"].tolist() != second.state_dict()["seeds"].tolist()
