"""Float64 observations that float32 cannot hold are said in one sentence."""

import re

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from alfish.environments import make_environment, precision


class Plant(gymnasium.Env):
    """A pressure around `offset`, and seconds since `start`."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(
        pressure=spaces.Box(-np.inf, np.inf, (2,), np.float64), time=spaces.Box(0, np.inf, (), np.float64)
    )

    def __init__(self, offset=0.0, start=0.0, rate=1.0):
        self.offset, self.start, self.rate = offset, start, rate

    def _observe(self):
        pressure = np.array([1.0, self.offset + self.np_random.normal()])
        return {"pressure": pressure, "time": np.array(self.start + self.rate * self.count)}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        return self._observe(), 0.0, False, self.count % 50 == 0, {}


class Flat(gymnasium.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def observation(self, observation):
        return np.array([*observation["pressure"], observation["time"]])


def said(caplog, wrappers=(), num_steps=precision.NUM_STEPS, evaluation=False, **settings):
    environment = make_environment(
        Plant, num_envs=2, env_kwargs=settings, wrappers=wrappers, evaluation=evaluation, seed=1
    )
    environment.reset()
    for _ in range(num_steps):
        environment.step(np.zeros(2, np.int64))
    environment.close()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"offset": 1e8}, r"observation\.pressure\[1\] ranges from 9999999\d\.\d+ to 10000000\d.* 8 apart"),
        ({"start": 1.76e9}, r"observation\.time ranges from 1760000000 to 1760000050, .* 128 apart"),
        ({"offset": 1e30}, ""),  # no change at all
        ({"offset": 1e4}, ""),
        ({"start": 1.76e9, "rate": 3600.0}, ""),
        ({}, ""),
    ],
)
@pytest.mark.parametrize("wrappers", [(), (Flat,)])
def test_a_leaf_whose_changes_float32_cannot_hold_is_named(caplog, settings, name, wrappers):
    found = said(caplog, wrappers, **settings)
    if not name:
        assert found == []
        return
    (sentence,) = found
    if wrappers:
        assert "observation[" in sentence and "subtract a constant" in sentence
    else:
        assert re.search(name, sentence), sentence


def test_the_warning_appears_once_and_only_in_training(caplog):
    assert len(said(caplog, num_steps=3 * precision.NUM_STEPS, offset=1e8)) == 1
    assert len(said(caplog, evaluation=True, offset=1e8)) == 1  # the one before
    assert len(said(caplog, num_steps=precision.NUM_STEPS - 1, offset=1e8)) == 1
