"""An environment that changes torch's default dtype is named; it would change what alfish computes."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import alfish
from alfish.errors import UsageError

SMALL = {"make_environment.num_envs": 2, "unroll_length": 32, "num_env_steps": 256, "MLP.layers": (8,)}


@pytest.fixture(autouse=True)
def dtype_is_left_as_it_was():
    yield
    found = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert found is torch.float32


def changing(method):
    """Returns a class of environments that changes the default dtype in a method."""

    def change(here):
        if here == method:
            torch.set_default_dtype(torch.float64)

    class Precise(gymnasium.Env):
        observation_space, action_space = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)

        def __init__(self):
            change("the constructor of Precise")

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            self.length = 0
            change("Precise.reset")
            return np.zeros(3, np.float32), {}

        def step(self, action):
            self.length += 1
            if self.length == 3:
                change("Precise.step")
            return np.zeros(3, np.float32), 1.0, self.length == 5, False, {}

    return Precise


@pytest.mark.parametrize("method", ["the constructor of Precise", "Precise.reset", "Precise.step"])
def test_a_method_that_changes_the_default_dtype_is_named(tmp_path, method):
    with pytest.raises(
        UsageError, match=rf"^{method}( or another part)? has called torch.set_default_dtype\(torch.float64\)"
    ):
        alfish.train("PPO", changing(method), root_dir=tmp_path / "run", **SMALL)


def test_a_program_that_changes_it_before_is_named(tmp_path):
    torch.set_default_dtype(torch.float64)
    with pytest.raises(UsageError, match="^the program has called torch.set_default_dtype"):
        alfish.train("PPO", changing("nothing"), root_dir=tmp_path / "run", **SMALL)
