"""The interface of games, and ordinary environments side by side."""

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_games import letters

from alfish import nest
from alfish.environments import VectorEnvironment, make_environment
from alfish.environments.games import SideBySide
from alfish.environments.toy import Corridor
from alfish.errors import UsageError


def cart_poles():
    return make_environment("CartPole-v1", 3, seed=1)


def pendulums():
    return make_environment("Pendulum-v1", 2, seed=2, env_kwargs={"g": 9.0})


def test_joint_agents_have_the_rows_of_their_environments():
    games = SideBySide({"cart": cart_poles(), "pendulum": pendulums()})
    alone = {"cart": cart_poles(), "pendulum": pendulums()}
    assert {name: (g.num_envs, g.agents, g.num_games) for name, g in games.groups.items()} == {
        "cart": (3, ("cart",), 3),
        "pendulum": (2, ("pendulum",), 2),
    }
    rows, expected = games.reset(), {name: one.reset() for name, one in alone.items()}
    assert games.starts.tolist() == [True] and games.num_resets == [1] and not games.has_gaps
    for t in range(60):
        for name in alone:
            for mine, other in zip(nest.leaves(rows[name]), nest.leaves(expected[name]), strict=True):
                np.testing.assert_array_equal(mine, other)
        action = {"cart": np.full(3, t % 2), "pendulum": np.full((2, 1), t / 60, np.float32)}
        rows = games.step({name: nest.tensors(each) for name, each in action.items()})
        expected = {name: one.step(action[name]) for name, one in alone.items()}
    assert games.starts.tolist() == [False]
    assert {"F", "M", "L"} <= set(letters(np.concatenate([rows["cart"].step_type, [0, 2]])))


def test_agents_side_by_side_are_saved_and_restored():
    games = SideBySide({"cart": cart_poles(), "pendulum": pendulums()})
    games.reset()
    state, again = games.state_dict(), SideBySide({"cart": cart_poles(), "pendulum": pendulums()})
    assert not again.load_state_dict(state) and again.num_resets == [1]
    action = {"cart": np.zeros(3, np.int64), "pendulum": np.zeros((2, 1), np.float32)}
    assert [letters(each.step_type) for each in again.step(action).values()] == ["FFF", "FF"]


class Remembered(SyncVectorEnv):
    """Corridors that a resumed run continues."""

    def get_state(self):
        return {"place": torch.zeros(1)}

    def set_state(self, state):
        assert "place" in state


def test_all_agents_are_reset_if_one_of_their_environments_cannot_continue():
    def games():
        env = Remembered([lambda: Corridor(5)] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)
        return SideBySide({"corridor": VectorEnvironment(env, [1, 2]), "cart": cart_poles()})

    first, again = games(), games()
    first.reset()
    assert not again.load_state_dict(first.state_dict())
    action = {"corridor": np.zeros(2, np.int64), "cart": np.zeros(3, np.int64)}
    assert [letters(each.step_type) for each in again.step(action).values()] == ["FF", "FFF"]
    assert [letters(each.step_type) for each in again.step(action).values()] == ["MM", "MMM"]


def test_same_step_resets_are_refused():
    env = SyncVectorEnv([lambda: Corridor(5)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with pytest.raises(UsageError, match="SideBySide: the environments 'x' .* build them with AutoresetMode.NEXT_STEP"):
        SideBySide({"x": VectorEnvironment(env, [1, 2])})
