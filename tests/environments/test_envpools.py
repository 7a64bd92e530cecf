"""EnvPool's environments in training and in evaluation, with seeds that they take in the constructor."""

import functools
import sys

import numpy as np
import pytest

from alfish import nest
from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.environments import make_environment
from alfish.learner.batches import EpochBatches
from alfish.training.trainer import Trainer

pytest.importorskip("envpool")
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")
ONLY_POOLS = "MiniGrid-Empty-5x5-v0"  # gymnasium has it only after the import of minigrid


def made(env_id=ONLY_POOLS, **arguments):
    return make_environment(env_id, vectorization="envpool", **arguments)


@pytest.mark.parametrize("env_id", ["CartPole-v1", ONLY_POOLS, "FetchReach-v4"])
def test_evaluations_build_environments_of_envpool_with_its_spaces(env_id):
    assert "minigrid" not in sys.modules
    trained, evaluated = made(env_id, num_envs=2), made(env_id, num_envs=3, evaluation=True)
    assert trained.observation_space == evaluated.observation_space
    assert trained.action_space == evaluated.action_space
    assert evaluated.seeds_rows and evaluated.num_envs == 3
    trained.close()
    evaluated.close()


def episode(environment, row, seed, count=20):
    """The observations of an environment, seeded alone, under fixed actions."""
    mask = np.arange(environment.num_envs) == row
    environment.reset([7] * environment.num_envs)
    first = environment.reset([seed if chosen else None for chosen in mask], mask)
    actions = np.random.default_rng(0).integers(2, size=count)
    steps = [environment.step(np.full(environment.num_envs, action)) for action in actions]
    return np.stack([step.observation[row] for step in (first, *steps)])


def test_a_seed_determines_the_episode_in_every_row():
    environment = made("CartPole-v1", num_envs=3, evaluation=True)
    one, other = (episode(environment, row, 11, 8) for row in (0, 2))
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one, episode(environment, 0, 12, 8))
    import envpool

    pool = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=[11])
    np.testing.assert_array_equal(one[0], pool.reset()[0][0])


def test_an_episode_without_a_seed_is_another_one():
    environment = made("CartPole-v1", num_envs=1, evaluation=True)
    first = environment.reset([3]).observation
    assert not np.array_equal(environment.reset([None], np.array([True])).observation, first)


def test_the_next_step_does_not_overwrite_rows():
    environment = made("CartPole-v1", num_envs=1, evaluation=True)
    kept = environment.reset([3]).observation
    before = kept.copy()
    environment.step(np.zeros(1, np.int64))
    np.testing.assert_array_equal(kept, before)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_run_trains_and_evaluates_where_gymnasium_has_no_such_id(tmp_path, num_envs):
    trainer = Trainer(
        tmp_path,
        algorithm=PPO,
        environment=functools.partial(made, num_envs=2),
        batches=functools.partial(EpochBatches, num_epochs=1),
        listeners=[],
        unroll_length=16,
        num_iterations=2,
        device="cpu",
    )
    assert trainer.train().updates > 0
    evaluator = trainer.evaluator(num_episodes=3, num_envs=num_envs)
    lengths = evaluator.evaluate(3, seed=5).lengths
    evaluator.close()
    assert lengths == (100, 100, 100) or len(set(lengths)) > 1


def test_check_env_steps_what_only_envpool_has(capsys, untried_training):
    arguments = [f"--env_id={ONLY_POOLS}", "--gin_param=make_environment.vectorization = 'envpool'"]
    assert main(["check-env", *arguments, "--num_steps=300"]) == 0
    shown = capsys.readouterr().out
    assert "same seed" not in shown and ", PPO, " in shown


def test_envpools_environments_are_filmed():
    environment = made("CartPole-v1", num_envs=2, evaluation=True, render_mode="rgb_array")
    environment.reset([1, 2])
    frame = environment.env.envs[1].render()
    assert frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_step_may_be_made_in_halves(env_id):
    def rows(halves):
        environment = made(env_id, num_envs=3, seed=2)
        found = [environment.reset()]
        action = np.zeros((3, *environment.action_spec.shape), environment.action_spec.dtype)
        for _ in range(40):
            if halves:
                environment.begin(action)
            found.append(environment.step(action))
        environment.close()
        return nest.leaves(found)

    for a, b in zip(rows(halves=True), rows(halves=False), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_environment_in_a_step_can_be_closed():
    environment = made("CartPole-v1", num_envs=2)
    environment.reset()
    environment.begin(np.zeros(2, np.int64))
    environment.close()


def test_a_resumed_pool_does_not_repeat_the_episodes_of_its_beginning():
    def beginnings(environment, count):
        rows = [environment.step(np.ones(2, np.int64)) for _ in range(count)]
        return {row.observation[0].tobytes() for row in rows if row.step_type[0] == 0}

    environment = made("CartPole-v1", num_envs=2, seed=2)
    environment.reset()
    found = beginnings(environment, 120)
    state = environment.state_dict()
    environment.close()
    resumed = made("CartPole-v1", num_envs=2, seed=2)
    assert not resumed.load_state_dict(state)
    later = beginnings(resumed, 120)
    resumed.close()
    assert len(found) > 5 and len(later) > 5 and not found & later
