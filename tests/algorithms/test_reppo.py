"""REPPO: targets of an unroll by brute force, the gate of each row, its learned weights, and runs that continue."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from toys import Bandit

from alfish import nest, specs
from alfish.algorithms.reppo import REPPO, REPPOTarget, REPPOTrain
from alfish.data import Experience, StepType, TimeStep
from alfish.environments import make_environment
from alfish.errors import UsageError
from alfish.functional.return_distributions import Bins, Quantiles
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, PredictiveCritic
from alfish.training.trainer import Trainer
from alfish.transforms import Transforms

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
OBSERVATION = spaces.Box(-10, 10, (3,), np.float32)
BOX = spaces.Box(-1, 1, (2,), np.float32)
SMALL = partial(MLP, layers=(8,), norm="rms", activation="silu")
NETWORKS = {"actor_mlp": SMALL, "critic": partial(PredictiveCritic, mlp=SMALL)}


def make(seed=0, **settings):
    torch.manual_seed(seed)
    return REPPO(OBSERVATION, BOX, specs.reward_spec(), **NETWORKS | settings)


def unroll(kinds, discounts):
    """Rows `[T+1, B]` of these step types and discounts, with random rewards, observations and actions."""
    step_type = torch.tensor(kinds, dtype=torch.int32).T
    shape = step_type.shape
    torch.manual_seed(1)
    step = TimeStep(step_type, torch.randn(shape), torch.tensor(discounts).T, torch.randn(*shape, 3), None, None)
    return Experience(step, torch.rand(*shape, 2) * 1.8 - 0.9, None, None)


# A time-out and what begins after it; a termination.
KINDS = [[FIRST, MID, LAST, FIRST, MID, MID], [FIRST, MID, MID, LAST, FIRST, MID]]
DISCOUNTS = [[1.0] * 6, [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]]


def prepared(reppo):
    experience = unroll(KINDS, DISCOUNTS)
    torch.manual_seed(2)
    with torch.no_grad():
        return reppo.preprocess_experience(experience)


def training_rows(experience):
    step, action = nest.at((experience.time_step, experience.action), slice(None, -1))
    return experience._replace(time_step=step, action=action)


def test_targets_are_soft_lambda_returns_that_bootstrap_only_at_time_outs():
    reppo = make(gamma=0.9, lambda_=0.7, initial_alpha=0.3)
    with torch.no_grad():
        reppo.critic.initial.zero_()
        reppo.critic.value_layer.weight.mul_(20)  # values that differ from row to row
    experience = unroll(KINDS, DISCOUNTS)
    step, found = experience.time_step, prepared(reppo).info.target
    torch.manual_seed(2)
    with torch.no_grad():
        action, log_prob = nest.at(reppo.policy(step.observation), slice(1, None)).sample_with_log_prob()
        value = reppo.values.scalarized(reppo.critic(step.observation[1:], action))
    assert value.std() > 0.5
    for column in range(2):
        following = None
        for t in reversed(range(5)):
            if step.step_type[t, column] == LAST:
                assert found[t, column] == 0
                following = None
                continue
            v, discount = value[t, column], 0.9 * step.discount[t + 1, column]
            soft = step.reward[t + 1, column] - discount * 0.3 * log_prob[t, column]
            is_cut = step.step_type[t + 1, column] == LAST or t == 4
            following = soft + discount * (v if is_cut else 0.3 * v + 0.7 * following)
            torch.testing.assert_close(found[t, column], following)
    torch.testing.assert_close(found[2, 1], step.reward[3, 1], msg="a termination has its reward only")


def loss_of(reppo, kl, log_prob=(-1.0, -1.0)):
    """Losses of two rows with these divergences, and the inputs of the actor's loss."""
    leaves = {"policy_q": [2.0, 3.0], "log_prob": log_prob, "kl": kl}
    leaves = {name: torch.tensor([value], requires_grad=True) for name, value in leaves.items()}
    policy = SimpleNamespace(kl=lambda later: leaves["kl"])
    target = REPPOTarget(policy, torch.zeros(1, 2), None)
    info = REPPOTrain(torch.zeros(1, 2, reppo.values.num_values), None, policy, leaves["policy_q"], leaves["log_prob"])
    return reppo.calc_loss(Experience(None, None, target, None), info), leaves


def test_rows_outside_the_trust_region_return_to_it():
    reppo = make(target_kl=0.1, initial_alpha=0.2, initial_beta=0.5, prediction_coef=0.0)
    info, leaves = loss_of(reppo, kl=[0.05, 0.4])
    assert info.extra["policy_loss"].tolist()[0] == pytest.approx([0.2 * -1 - 2, 0.5 * 0.4])
    assert info.extra["kl_fraction"].tolist() == [[0, 1]]
    info.loss["actor"].sum().backward()
    assert leaves["log_prob"].grad.tolist()[0] == pytest.approx([0.2, 0])
    assert leaves["policy_q"].grad.tolist() == [[-1, 0]]
    assert leaves["kl"].grad.tolist()[0] == pytest.approx([0, 0.5])


@pytest.mark.parametrize("log_prob, sign", [(-3.0, 1), (5.0, -1)])
def test_the_temperature_falls_above_the_target_entropy(log_prob, sign):
    reppo = make(entropy_fraction=0.5, prediction_coef=0.0, initial_alpha=0.2)  # the target is -1
    info, _ = loss_of(reppo, [0.1, 0.1], [log_prob, log_prob])
    info.loss["actor"].mean().backward()
    assert reppo.log_alpha.grad.item() == pytest.approx(0.2 * (-log_prob + 1))
    assert np.sign(reppo.log_alpha.grad.item()) == sign


@pytest.mark.parametrize("kl, sign", [([0.0, 0.1], 1), ([0.1, 0.4], -1)])
def test_divergence_weight_rises_above_the_target_and_falls_below(kl, sign):
    reppo = make(target_kl=0.1, prediction_coef=0.0, initial_beta=0.5)
    info, _ = loss_of(reppo, kl)
    info.loss["actor"].mean().backward()
    assert reppo.log_beta.grad.item() == pytest.approx(0.5 * (0.1 - np.mean(kl)), abs=1e-6)
    assert np.sign(reppo.log_beta.grad.item()) == sign


def test_the_losses_of_the_weights_do_not_train_the_policy():
    reppo = make(prediction_coef=0.0)
    experience = training_rows(prepared(reppo))
    info = reppo.calc_loss(experience, reppo.train_step(experience, None).info)
    rest = (info.loss["actor"] - info.extra["policy_loss"]).mean()
    rest.backward()
    trained = {name for name, p in reppo.named_parameters() if p.grad is not None and p.grad.count_nonzero() > 0}
    assert trained == {"log_alpha", "log_beta"}


def test_the_old_policy_is_the_unroll_policy_for_one_iteration():
    reppo = make()
    source, divergences, olds = EpochBatches(4, 8), [], []
    source.bind(reppo, Transforms([], OBSERVATION, specs.reward_spec()), 8, 1)
    for _ in range(2):
        source.add(unroll([[FIRST] + [MID] * 8], [[1.0] * 9]))
        learner = Learner(reppo, learning_rate=1e-2, compile=False)
        for chunk in source.chunks(0):
            experience = chunk.source.experience
            old = reppo.policy(experience.time_step.observation)
            divergences.append(experience.info.policy.kl(old).max().item())
            olds.append(experience.info.policy.mean.clone())
            learner.train([chunk])
    for first in (0, 4):
        assert divergences[first] == pytest.approx(0, abs=1e-6), "the first updates begin at the policy that acted"
        assert min(divergences[first + 1 : first + 4]) > 1e-6
        assert all(torch.equal(olds[first], old) for old in olds[first : first + 4])
    assert not torch.equal(olds[0], olds[4])


def test_initial_values_are_near_0_and_the_critic_learns_mean_targets():
    reppo = make(values=partial(Bins, num_bins=51, low=-5.0, high=5.0, smoothing=0.75))
    observation, action = torch.randn(64, 3), torch.rand(64, 2)
    assert reppo.values.scalarized(reppo.critic(observation, action)).abs().max() < 0.01
    optimizer = torch.optim.Adam(reppo.critic.parameters(), 1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        target = reppo.values.certain(torch.full((64,), 2.5))
        reppo.values.loss(reppo.critic(observation, action), target).loss.mean().backward()
        optimizer.step()
    assert (reppo.values.scalarized(reppo.critic(observation, action)) - 2.5).abs().max() < 0.1


def test_critic_predicts_features_of_the_next_row():
    reppo = make(prediction_coef=2.0)
    with_it = prepared(reppo)
    step = with_it.time_step
    torch.manual_seed(2)
    with torch.no_grad():
        action, _ = nest.at(reppo.policy(step.observation), slice(1, None)).sample_with_log_prob()
        expected = reppo.critic.features(step.observation[1:], action)
    torch.testing.assert_close(with_it.info.next_features, expected)
    rows = training_rows(with_it)
    info = reppo.train_step(rows, None).info
    found = reppo.calc_loss(rows, info)
    cross_entropy = reppo.values.loss(info.q, reppo.values.certain(rows.info.target)).loss
    prediction = (info.prediction - expected).square().mean(-1)
    torch.testing.assert_close(found.loss["critic"], cross_entropy + 2 * prediction)


def test_a_weight_of_0_disables_prediction_and_storage():
    reppo = make(prediction_coef=0.0)
    assert list(reppo.critic.predictor.parameters()) == []
    rows = training_rows(prepared(reppo))
    info = reppo.train_step(rows, None).info
    assert rows.info.next_features is None and info.prediction is None
    assert "prediction_loss" not in reppo.calc_loss(rows, info).extra


def test_the_share_of_returns_beyond_the_bins_is_shown():
    reppo = make(values=partial(Bins, num_bins=11, low=-1.0, high=1.0, smoothing=0.75), prediction_coef=0.0)
    rows = training_rows(prepared(reppo))
    rows = rows._replace(info=rows.info._replace(target=torch.tensor([[-1.5, 0.0], [1.0, 1.01]])))
    rows = rows._replace(time_step=nest.at(rows.time_step, slice(2)), action=rows.action[:2],
                         info=rows.info._replace(policy=nest.at(rows.info.policy, slice(2))))  # fmt: skip
    found = reppo.calc_loss(rows, reppo.train_step(rows, None).info).extra["returns_clipped"]
    assert found.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    "action, reward, settings, words",
    [
        (spaces.Discrete(3), None, {}, "REPPO requires bounded Box actions, but the action is Discrete"),
        (spaces.Box(-np.inf, np.inf, (2,)), None, {}, "REPPO requires bounded Box actions"),
        (BOX, 2, {}, "REPPO requires a scalar reward, but the environment's reward is a vector of 2"),
        (BOX, None, {"values": Quantiles}, "REPPO.values made a Quantiles; it must be .* returns a Bins"),
        (BOX, None, {"critic": lambda *specs: MLP(3)}, "REPPO.critic made an MLP, which has no features and no value"),
    ],
)
def test_what_it_cannot_learn_from_is_refused(action, reward, settings, words):
    with pytest.raises(UsageError, match=words):
        REPPO(OBSERVATION, specs.action_spec(action), specs.reward_spec(reward), **settings)


def trainer(root_dir, seed=0, num_iterations=40, **settings):
    options = {
        "algorithm": partial(REPPO, gamma=0.5, values=partial(Bins, num_bins=21, low=-4.0, high=4.0, smoothing=0.75),
                             **NETWORKS),
        "environment": partial(make_environment, Bandit, num_envs=8, env_kwargs={"action": "box"}),
        "batches": partial(EpochBatches, num_epochs=8, minibatch_size=64),
        "learner": partial(Learner, learning_rate=1e-2, max_grad_norm=0.5),
        "unroll_length": 16,
        "listeners": [],
        "metrics": [],
        "device": "cpu",
    }  # fmt: skip
    return Trainer(root_dir, seed=seed, num_iterations=num_iterations, **options | settings)


@pytest.mark.slow
def test_it_learns_the_right_number_for_each_observation(tmp_path):
    found = trainer(tmp_path)
    found.train()
    evaluator = found.evaluator(64)
    try:
        assert evaluator.evaluate(64, seed=1000).mean > 3.7
    finally:
        evaluator.close()
