"""Environments of gymnax by id and by class: their dynamics, ends and limits, and a run that is resumed."""

import functools

import numpy as np
import pytest
import torch

from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.data import StepType
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches
from alfish.simulators.gymnax_environment import GymnaxEnvironment
from alfish.training.trainer import Trainer

gymnax = pytest.importorskip("gymnax", reason="gymnax is not installed: pip install 'alfish[gymnax]'")
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


@pytest.fixture(scope="module")
def cartpole():
    """Eight CartPoles with a limit of 30 steps, by their id."""
    return make_environment("gymnax:CartPole-v1", 8, env_kwargs={"params": {"max_steps_in_episode": 30}}, seed=4)


def moved(observation, action):
    """What gymnax's own step makes of observations, without a reset."""
    import jax
    from gymnax.environments.classic_control.cartpole import EnvState

    env, params = gymnax.make("CartPole-v1")
    state = EnvState(np.zeros(len(observation), np.int32), *observation.numpy().T)
    step = jax.vmap(lambda one, chosen: env.step_env(jax.random.PRNGKey(0), one, chosen, params)[0])
    return np.asarray(step(state, action.numpy()))


def test_rows_follow_gymnax_and_episodes_end_where_it_says(cartpole):
    assert cartpole.name == "gymnax:CartPole-v1"
    before, length = cartpole.reset().observation, np.zeros(8)
    generator, counts = torch.Generator().manual_seed(0), {"terminated": 0, "truncated": 0}
    for _ in range(80):
        # Half of the environments push against the pole's fall, so that some episodes reach the limit.
        held = (before[:, 2] + 0.5 * before[:, 3] > 0).long()
        action = torch.where(torch.arange(8) < 4, held, torch.randint(2, (8,), generator=generator))
        last = cartpole.step(action)
        np.testing.assert_allclose(last.observation, moved(before, action), rtol=1e-5, atol=1e-6)
        assert last.reward.tolist() == [1.0] * 8
        length += 1
        fallen = (last.observation[:, 0].abs() > 2.4) | (last.observation[:, 2].abs() > 12 * 2 * np.pi / 360)
        ended = fallen.numpy() | (length == 30)
        assert (last.step_type == LAST).tolist() == ended.tolist()
        assert (last.discount == 0).tolist() == fallen.tolist()
        counts["terminated"] += int(fallen.sum())
        counts["truncated"] += int((ended & ~fallen.numpy()).sum())
        resets, first = cartpole.take_resets()
        assert first.observation[resets].abs().max() <= 0.05 if resets.any() else True
        before, length = torch.where(resets[:, None], first.observation, last.observation), np.where(ended, 0, length)
    assert min(counts.values()) >= 4, counts


def test_a_checkpoint_of_the_environment_continues_bit_for_bit(cartpole):
    cartpole.reset([1] * 8)
    actions = torch.randint(2, (30, 8), generator=torch.Generator().manual_seed(1))
    for action in actions[:5]:
        cartpole.step(action)
    saved = {name: leaf.clone() for name, leaf in cartpole.state_dict()["env"].items()}
    expected = [cartpole.step(action).observation for action in actions]
    assert cartpole.load_state_dict({"env": saved}) is True
    assert all(torch.equal(cartpole.step(action).observation, row) for action, row in zip(actions, expected))


def test_observations_of_another_dtype_than_declared_are_accepted():
    catch = make_environment("gymnax:Catch-bsuite", 2)  # gymnax declares integers and returns floats
    assert catch.observation_space.dtype == np.float32
    catch.reset()
    assert catch.step(torch.zeros(2, dtype=torch.int64)).observation.dtype == torch.float32


def test_unknown_environments_and_parameters_are_refused_with_known_names():
    with pytest.raises(UsageError, match="gymnax has no task 'CartPol-v1'; did you mean 'CartPole-v1'"):
        make_environment("gymnax:CartPol-v1")
    with pytest.raises(UsageError, match="CartPole-v1 has no parameter 'gravitation'; it has max_steps_in_episode, gr"):
        GymnaxEnvironment("CartPole-v1", params={"gravitation": 1})


def test_options_are_passed_to_gymnax_with_integers():
    space = GymnaxEnvironment("DeepSea-bsuite", options={"size": 5}).observation_space
    assert space.shape == (5, 5)


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(tmp_path):
    def trainer(name):
        return Trainer(
            tmp_path / name,
            algorithm=PPO,
            environment=functools.partial(make_environment, "gymnax:CartPole-v1", num_envs=4),
            batches=functools.partial(EpochBatches, num_epochs=1),
            listeners=[],
            unroll_length=16,
            num_iterations=4,
            device="cpu",
        )

    whole = trainer("whole")
    assert whole.train().updates > 0
    stopped = trainer("stopped")
    stopped.start()
    assert next(iter(stopped.iterate())).iterations == 1
    stopped.save()
    stopped.close()
    resumed = trainer("stopped")
    assert resumed.train().iterations == 4
    pairs = list(zip(whole.algorithm.parameters(), resumed.algorithm.parameters(), strict=True))
    assert pairs and all(torch.equal(one, other) for one, other in pairs)
    states = [one.unroller.environment.state_dict()["env"] for one in (whole, resumed)]
    assert all(torch.equal(leaf, states[1][path]) for path, leaf in states[0].items())
    evaluator = resumed.evaluator(num_episodes=3, num_envs=2)
    assert evaluator.evaluate(3, seed=5).lengths == evaluator.evaluate(3, seed=5).lengths
    evaluator.close()


def test_check_env_reports_no_fault(capsys, monkeypatch):
    monkeypatch.setattr("alfish.bin.check_env.suggestions", lambda *_: [])  # which trains, see test_first_run.py
    assert main(["check-env", "--env_id=gymnax:CartPole-v1", "--num_steps=60"]) == 0
    printed = capsys.readouterr().out
    assert "problem" not in printed and ", PPO, " in printed
