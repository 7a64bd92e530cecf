"""Joint steps give the stream of single environments, bit for bit, and are used only where that was shown."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from calls import python_calls
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics, TimeLimit
from test_vector import assert_identical

from alfish.environments import joint_steps, make_environment
from alfish.environments.joint_steps import JointCartPoles
from alfish.environments.sequential import SequentialVectorEnv

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]


def cart_pole(**kwargs):
    return gymnasium.make("CartPole-v1", disable_env_checker=True, **kwargs)


def balance(observation):
    """Actions that keep most poles up until the time limit."""
    return (observation[:, 2] + observation[:, 3] > 0).astype(np.int64)


def stream(env, num_steps, acts):
    """All that a vector environment returns; half of the actions are random."""
    generator = np.random.default_rng(0)
    yield (row := env.reset(seed=list(range(env.num_envs))))
    for t in range(num_steps):
        action = generator.integers(2, size=env.num_envs)
        yield (row := env.step(np.where(acts == "at random" or t % 97 < 3, action, balance(row[0]))))
        done = row[2] | row[3]
        if env.metadata["autoreset_mode"] == AutoresetMode.DISABLED and done.any():
            yield (row := env.reset(options={"reset_mask": done}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("acts", ["at random", "well"])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_vector_cart_poles_equal_single_environments(num_envs, acts, mode):
    joint = SequentialVectorEnv([cart_pole] * num_envs, mode)
    assert isinstance(joint.joint, JointCartPoles)
    num_terminated = num_truncated = 0
    num_steps = 200 if acts == "at random" else 1200  # an episode is truncated after 500
    expected = stream(SyncVectorEnv([cart_pole] * num_envs, autoreset_mode=mode), num_steps, acts)
    for one, other in zip(stream(joint, num_steps, acts), expected, strict=True):
        assert_identical(one, other)
        if len(other) == 5:
            num_terminated, num_truncated = num_terminated + other[2].sum(), num_truncated + other[3].sum()
    assert num_terminated if acts == "at random" else num_truncated


def test_a_joint_step_makes_a_third_of_the_calls():
    envs = [SequentialVectorEnv([cart_pole] * 8, AutoresetMode.NEXT_STEP) for _ in range(2)]
    envs[1].joint = None
    found = []
    for env in envs:
        env.gathers_infos = False
        env.reset(seed=list(range(8)))
        env.step(np.zeros(8, np.int64)), env.step(np.ones(8, np.int64))
        found.append(python_calls(lambda env=env: env.step(np.ones(8, np.int64))))
    assert found[0] <= 36 and found[1] >= 3 * found[0], found


def test_joint_and_single_steps_may_alternate():
    switching, single = (SequentialVectorEnv([cart_pole] * 2, AutoresetMode.NEXT_STEP) for _ in range(2))
    steps, single.joint = switching.joint, None
    rows = [env.reset(seed=[1, 2])[0] for env in (switching, single)]
    for t in range(300):
        switching.joint = steps if t // 7 % 2 else None
        action = balance(rows[1]) if t % 5 else np.array([0, 1])
        found, expected = switching.step(action), single.step(action)
        assert_identical(found, expected)
        rows = [found[0], expected[0]]


def test_an_environment_with_other_physics_keeps_them():
    envs = [SequentialVectorEnv([cart_pole] * 2, AutoresetMode.NEXT_STEP) for _ in range(2)]
    envs[1].joint = None
    for env in envs:
        env.reset(seed=[1, 2])
        env.envs[1].unwrapped.length, env.envs[1].unwrapped.theta_threshold_radians = 0.7, 0.1
    for t in range(60):
        assert_identical(*(env.step(np.array([t % 2, t % 3 % 2])) for env in envs))


def test_joint_steps_rebuild_and_interrupt_environments():
    envs = [SequentialVectorEnv([cart_pole] * 3, AutoresetMode.NEXT_STEP) for _ in range(2)]
    envs[1].joint = None
    for env in envs:
        env.reset(seed=[1, 2, 3])
        env.step(np.ones(3, np.int64))
    for method in ("replace", "break_off"):
        firsts = []
        for env in envs:
            torch.manual_seed(0)  # seeds of rebuilt environments
            firsts.append(getattr(env, method)(np.array([False, True, False])))
        assert_identical(*firsts)
        envs[1].joint = None
        for t in range(20):
            assert_identical(*(env.step(np.array([t % 2, 1, 0])) for env in envs))
    assert isinstance(envs[0].joint, JointCartPoles)


class OwnCartPole(CartPoleEnv):
    pass


def own():
    env = OwnCartPole()
    env.spec = gymnasium.spec("CartPole-v1")
    return TimeLimit(OrderEnforcing(env), 9)


OTHERS = {
    "a subclass": own,
    "no time limit": lambda: cart_pole(max_episode_steps=-1),
    "a wrapper": lambda: RecordEpisodeStatistics(cart_pole()),
    "a wrapper inside": lambda: TimeLimit(OrderEnforcing(RecordEpisodeStatistics(CartPoleEnv())), 9),
    "films": lambda: cart_pole(render_mode="rgb_array"),
    "other rewards": lambda: cart_pole(sutton_barto_reward=True),
    "another class": lambda: gymnasium.make("MountainCar-v0", disable_env_checker=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_others_step_one_by_one(name):
    assert SequentialVectorEnv([OTHERS[name]] * 2, AutoresetMode.NEXT_STEP).joint is None


def test_one_other_environment_among_them_is_enough():
    env = SequentialVectorEnv([cart_pole, OTHERS["a wrapper"]], AutoresetMode.NEXT_STEP)
    assert env.joint is None and joint_steps.joint_steps(env.envs[:1]) is not None


def off_by_a_bit(step):
    """Returns steps whose last observation is the next float32 in one entry."""

    @functools.wraps(step)
    def changed(self, *arguments):
        observations, *rest = step(self, *arguments)
        *others, last = observations[-1]
        return (*observations[:-1], (*others, float(np.nextafter(np.float32(last), np.float32(9))))), *rest

    return changed


def failing(step):
    def changed(self, *arguments):
        raise AttributeError("'TimeLimit' object has no attribute '_elapsed_steps'")

    return changed


def late(step):
    """Returns steps that forget the time limit."""

    @functools.wraps(step)
    def changed(self, *arguments):
        *rest, truncations = step(self, *arguments)
        return *rest, [False] * len(truncations)

    return changed


@pytest.mark.parametrize("other", [off_by_a_bit, failing, late])
def test_joint_steps_are_not_used_if_bits_differ(monkeypatch, other):
    monkeypatch.setattr(JointCartPoles, "step", other(JointCartPoles.step))
    joint_steps._gives_equal_bits.cache_clear()
    assert SequentialVectorEnv([cart_pole], AutoresetMode.NEXT_STEP).joint is None
    monkeypatch.undo()
    joint_steps._gives_equal_bits.cache_clear()
    assert SequentialVectorEnv([cart_pole], AutoresetMode.NEXT_STEP).joint is not None


# Ids with a vector class. In each the class draws other numbers than single environments, so no run takes it unasked.
WITH_VECTOR_CLASS = {"CartPole-v0", "CartPole-v1", "phys2d/CartPole-v0", "phys2d/CartPole-v1", "phys2d/Pendulum-v0"}


def test_each_vector_class_of_gymnasium_was_compared():
    own = {name for name, spec in gymnasium.registry.items() if "gymnasium.envs" in str(spec.entry_point)}
    assert {name for name in own if gymnasium.spec(name).vector_entry_point} <= WITH_VECTOR_CLASS


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
@pytest.mark.parametrize("vectorization", ["vector_entry_point", "envpool"])
def test_a_vector_class_and_envpool_draw_other_numbers(vectorization):
    if vectorization == "envpool":
        pytest.importorskip("envpool")
    rows = [make_environment("CartPole-v1", 2, each, seed=1).reset() for each in ("sync", vectorization)]
    assert not np.array_equal(rows[0].observation, rows[1].observation)


def test_the_log_reports_stepping_mode_and_faster_alternatives():
    made = {
        "": make_environment("CartPole-v1"),
        "in one loop": make_environment("CartPole-v1", 2),
        "one by one": make_environment("MountainCar-v0", 2),
        "in CartPoleVectorEnv": make_environment("CartPole-v1", 2, "vector_entry_point"),
    }
    assert {words: (env.stepping, env.remark) for words, env in made.items()} == {words: (words, "") for words in made}
    assert "make_environment.vectorization = 'vector_entry_point'" in make_environment("CartPole-v1", 64).remark
    wrapped = make_environment("CartPole-v1", 64, wrappers=["gymnasium.wrappers:FlattenObservation"])
    assert wrapped.stepping == "one by one" and wrapped.remark == ""
    assert make_environment("MountainCar-v0", 64).remark == ""
