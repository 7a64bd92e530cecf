"""Rounds of apprenticeship learning in runs: resuming, the returned policy, and wrong settings."""

import functools
import itertools

import pytest
import torch
from resuming import assert_same, parameters, tensors_of

from alfish.algorithms.composition import ApprenticeshipLearning, Composed
from alfish.algorithms.ppo import PPO
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.learner.batches import EpochBatches
from alfish.networks import MLP, ActorCritic, Torso
from alfish.offline import Arrays, OfflineBuffer, Spaces
from alfish.training.apprenticeship import ApprenticeshipRounds
from alfish.training.evaluator import make_evaluator
from alfish.training.listeners import CheckpointSaver
from alfish.training.trainer import Trainer

# As in test_imitation_runs.py, all episodes of 6 rows end with row 35, after five unrolls of 7 rows.
ENVIRONMENT = functools.partial(make_environment, "Pendulum-v1", env_kwargs={"max_episode_steps": 5}, num_envs=2)
TORSO = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,)))
INNER = functools.partial(PPO, network=functools.partial(ActorCritic, actor_torso=TORSO, critic_torso=TORSO))


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    settings = {"environment": ENVIRONMENT, "num_iterations": 1, "unroll_length": 8, "device": "cpu"}
    trainer = Trainer(tmp_path_factory.mktemp("expert"), algorithm=INNER, batches=EpochBatches, **settings)
    evaluator = make_evaluator(ENVIRONMENT, trainer.algorithm, trainer.transforms, num_episodes=3)
    episodes = evaluator.generate_test_episodes(3, seed=50, sample=True)
    known = Spaces(evaluator.environment.observation_space, evaluator.environment.action_space)
    evaluator.close()
    trainer.close()
    return functools.partial(OfflineBuffer, [Arrays(episodes, known)], num_columns=1)


def make(root_dir, demonstrations, rounds=True, num_iterations=6, **settings):
    part = functools.partial(ApprenticeshipLearning, demonstrations=demonstrations)
    algorithm = functools.partial(Composed, algorithm=INNER, rewards=[part], extrinsic_coef=0.0)
    closes = [ApprenticeshipRounds(period=32, num_episodes=2, **settings)] if rounds else []
    return Trainer(
        root_dir, algorithm=algorithm, environment=ENVIRONMENT, unroll_length=7, num_iterations=num_iterations,
        batches=functools.partial(EpochBatches, num_epochs=2, minibatch_size=7), device="cpu",
        listeners=[*closes, CheckpointSaver(0)],
    )  # fmt: skip


def rounds_of(trainer):
    return next(listener for listener in trainer.listeners if isinstance(listener, ApprenticeshipRounds))


def test_a_resumed_run_is_bit_identical(tmp_path, demonstrations):
    whole = make(tmp_path / "whole", demonstrations, num_iterations=8)
    whole.train()
    assert whole.algorithm.rewards["appl"].num_rounds > 3
    cut = make(tmp_path / "cut", demonstrations, num_iterations=8)
    cut.start()
    for report in itertools.islice(cut.iterate(), 5):
        for listener in cut.listeners:
            listener.after_iteration(cut, report)
    cut.save()
    cut.close()
    assert 1 < int(cut.algorithm.rewards["appl"].num_rounds) < int(whole.algorithm.rewards["appl"].num_rounds)
    torch.manual_seed(99)
    resumed = make(tmp_path / "cut", demonstrations, num_iterations=8)
    resumed.train()
    assert_same(tensors_of(resumed), tensors_of(whole))
    assert_same(rounds_of(resumed).state_dict(), rounds_of(whole).state_dict())


def test_a_longer_budget_continues_from_the_trained_policy(tmp_path, demonstrations):
    longer = make(tmp_path / "longer", demonstrations, num_iterations=8)
    longer.start()
    found = {}
    for report in longer.iterate():
        found[report.iterations] = parameters(longer)
        for listener in longer.listeners:
            listener.after_iteration(longer, report)
    short = make(tmp_path / "short", demonstrations, num_iterations=4)
    short.train()
    state = rounds_of(short).state_dict()
    kept = dict(short.algorithm.named_parameters())
    for name, tensor in state["nearest"]["policy"].items():
        if name in kept:
            assert torch.equal(kept[name], tensor)
    trained = torch.cat([state["trained"][name].reshape(-1) for name in kept])
    assert torch.equal(trained, found[4])
    longer.close()


def test_a_run_without_an_end_of_rounds_is_refused(tmp_path, demonstrations):
    with pytest.raises(UsageError, match=r"reward of ApprenticeshipLearning would always be 0.*@ApprenticeshipRounds"):
        make(tmp_path, demonstrations, rounds=False).train()


def test_rounds_without_their_reward_are_refused(tmp_path):
    trainer = Trainer(
        tmp_path, algorithm=INNER, environment=ENVIRONMENT, unroll_length=8, num_iterations=1, device="cpu",
        batches=EpochBatches, listeners=[ApprenticeshipRounds(), CheckpointSaver(0)],
    )  # fmt: skip
    with pytest.raises(UsageError, match="closes the rounds of ApprenticeshipLearning, which this run does not have"):
        trainer.train()


def test_a_run_stops_when_the_mixture_is_near_the_expert(tmp_path, demonstrations):
    trainer = make(tmp_path, demonstrations, epsilon=1e6)
    report = trainer.train()
    assert 0 < report.iterations < 6 and "from the expert" in trainer.clock.stop_reason
