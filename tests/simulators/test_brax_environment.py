"""Environments in brax's interface: final observations, ends, limits, parts of an observation and checkpoints."""

import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfish.data import StepType
from alfish.environments import SimulatorEnvironment, make_environment
from alfish.errors import UsageError
from alfish.simulators.brax_environment import BraxEnvironment, PlaygroundEnvironment

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install jax")
pytestmark = pytest.mark.filterwarnings("ignore:JAXopt is no longer maintained:DeprecationWarning")


class State(NamedTuple):
    """A state of `Stone`."""

    obs: Any
    reward: Any
    done: Any


class Stone:
    """An environment in brax's interface: a stone falls from a random height of 3 to 6, and the episode ends at 0."""

    action_size = 2

    def reset(self, key):
        height = jax.random.randint(key, (1,), 3, 7).astype("float32")
        return State({"height": height, "start": height}, 0.0, 0.0)

    def step(self, state, action):
        height = state.obs["height"] - 1
        return State({**state.obs, "height": height}, action[0], (height[0] == 0).astype("float32"))


@pytest.fixture
def playground(monkeypatch):
    """A Playground that has only the stone."""
    loaded = []

    def load(task, config_overrides):
        loaded.append((task, config_overrides))
        return Stone()

    registry = SimpleNamespace(ALL_ENVS=("Stone",), get_default_config=lambda task: {"episode_length": 4}, load=load)
    monkeypatch.setitem(sys.modules, "mujoco_playground", SimpleNamespace(registry=registry))
    return loaded


def test_a_fallen_stone_terminates_and_the_length_limit_truncates(playground):
    environment = SimulatorEnvironment(PlaygroundEnvironment("Stone", 8), seed=0)
    assert environment.action_space == spaces.Box(-1.0, 1.0, (2,))
    environment.reset()
    ends = set()
    for step in range(1, 20):
        last = environment.step(torch.full((8, 2), 0.5))
        assert last.reward.tolist() == [0.5] * 8
        height, start = (last.observation[name][:, 0] for name in ("height", "start"))
        assert ((last.step_type == StepType.LAST) == ((height == 0) | (start - height == 4))).all(), step
        assert ((last.discount == 0) == (height == 0)).all()
        ends |= set(zip(start.tolist(), height.tolist())) if (last.step_type == StepType.LAST).any() else set()
        resets, first = environment.take_resets()
        assert (first.observation["height"] == first.observation["start"])[resets].all()
    assert {(3.0, 0.0), (4.0, 0.0), (5.0, 1.0), (6.0, 2.0)} <= ends


def test_changes_of_the_configuration_of_playground_are_given_and_hold(playground):
    environment = PlaygroundEnvironment("Stone", 2, config={"episode_length": 2})
    assert playground == [("Stone", {"episode_length": 2})] and environment.time_limit == 2
    with pytest.raises(UsageError, match="Playground has no task 'Ston'; did you mean 'Stone'"):
        PlaygroundEnvironment("Ston", 2)


def test_a_key_error_of_an_environment_is_not_reported_as_an_unknown_name(monkeypatch):
    def get_environment(task):
        raise KeyError("wheel" if task == "car" else task)

    monkeypatch.setitem(sys.modules, "brax.envs", SimpleNamespace(get_environment=get_environment))
    with pytest.raises(UsageError, match="brax has no task 'fats'; it has for example 'ant' and 'halfcheetah'"):
        BraxEnvironment("fats")
    with pytest.raises(KeyError, match="wheel"):
        BraxEnvironment("car")


@pytest.fixture(scope="module")
def fast():
    """Four environments of brax's `fast`, whose observation of position and speed grows from 0."""
    pytest.importorskip("brax", reason="brax is not installed: pip install 'alfish[brax]'")
    options = {"obs_mode": "dict_state", "asymmetric_obs": True}
    return make_environment(
        "brax:fast", 4, env_kwargs={"time_limit": 6, "options": options}, spread_first_episodes=False
    )


class TestBrax:
    """The package itself."""

    pytestmark = pytest.mark.slow

    def test_final_observations_belong_to_the_ended_episode(self, fast):
        before, num_ends = fast.reset().observation["state"], 0
        for step in range(1, 25):
            last = fast.step(torch.ones(4, 1))
            resets, first = fast.take_resets()
            speed = before[:, 1] + 0.02
            expected = torch.stack([before[:, 0] + 0.02 * speed, speed], 1)
            torch.testing.assert_close(last.observation["state"], expected)
            torch.testing.assert_close(last.reward, expected[:, 0])
            assert resets.tolist() == [step % 6 == 0] * 4
            assert last.discount.tolist() == [1.0] * 4  # truncated, never terminated
            if resets.any():
                assert (last.step_type == StepType.LAST).all() and (first.observation["state"] == 0).all()
                assert (last.observation["state"] != first.observation["state"]).all()
                num_ends += 4
            before = torch.where(resets[:, None], first.observation["state"], last.observation["state"])
        assert num_ends == 16

    def test_spaces_match_the_states(self, fast):
        assert fast.name == "brax:fast" and isinstance(fast.observation_space, spaces.Dict)
        shapes = {name: part.shape for name, part in fast.observation_space.items()}
        assert shapes == {"privileged_state": (4,), "state": (2,)}
        assert fast.action_space == spaces.Box(-1.0, 1.0, (1,))

    def test_a_checkpoint_continues_bit_for_bit(self, fast):
        fast.reset()
        actions = torch.rand(20, 4, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
        for action in actions[:4]:
            fast.step(action)
        saved = {name: leaf.clone() for name, leaf in fast.state_dict()["env"].items()}
        assert len(saved) >= 10 and any(np.ptp(leaf.numpy()) for leaf in saved.values())
        expected = [fast.step(action).observation["state"] for action in actions]
        assert fast.load_state_dict({"env": saved}) is True
        assert all(torch.equal(fast.step(action).observation["state"], row) for action, row in zip(actions, expected))
