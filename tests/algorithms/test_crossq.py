"""SAC with a joint pass, without target networks, and with batch norm."""

import copy
import functools

import pytest
import torch
from test_sac import ACTIONS, BOX, make, rows

from alfish.algorithms.crossq import XQC, CrossQ
from alfish.algorithms.sac import SAC
from alfish.data import Batch
from alfish.learner.batches import Minibatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, CriticEnsemble
from alfish.networks.bodies.batch_norm import BatchNorm, Moments, has_batch_norm
from alfish.networks.layers import UnitRows

NORMED = {
    "critic": functools.partial(CriticEnsemble, layers=(8, 6), norm="batch", norm_after=True),
    "actor_mlp": functools.partial(MLP, layers=(8,), norm="batch", norm_after=True, activation="relu"),
    "kind": CrossQ,
}


def losses_of(sac, experience):
    torch.manual_seed(3)
    return sac.calc_loss(experience, sac.train_step(experience, None).info)


def chunk(experience):
    size = experience.time_step.reward.shape[1]
    batch = Batch(experience, torch.ones(1, size, dtype=torch.bool))
    return [Minibatches(batch, torch.arange(size).view(1, size))]


def learner_of(sac, **settings):
    return Learner(sac, compile=False, **settings)


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("target_rate", [0.005, None])
def test_without_batch_norm_a_joint_pass_gives_the_losses_of_two_passes(name, target_rate):
    experience = rows(ACTIONS[name], step_type=(0, 1, 1), discount=(1.0, 1.0, 0.0))
    apart, joint = (make(ACTIONS[name], kind=kind, target_rate=target_rate) for kind in (SAC, CrossQ))
    joint.load_state_dict(apart.state_dict())
    one, other = losses_of(apart, experience), losses_of(joint, experience)
    for group in one.loss:
        torch.testing.assert_close(one.loss[group], other.loss[group])
        gradients = []
        for sac, found in ((apart, one), (joint, other)):
            gradients.append(torch.autograd.grad(found.loss[group].sum(), list(sac.critic.parameters()),
                                                 retain_graph=True, allow_unused=True))  # fmt: skip
        for a, b in zip(*gradients):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)


def test_without_targets_next_values_are_detached_critic_values():
    sac, experience = make(target_rate=None, kind=CrossQ), rows(BOX)
    assert not [name for name in sac.state_dict() if name.startswith("target")]
    info = sac.train_step(experience, None).info
    assert not info.following.value.requires_grad and info.q.requires_grad
    torch.manual_seed(4)
    drawn = sac.policy(experience.time_step.observation[1:], None).choose()
    torch.manual_seed(4)
    info = sac.train_step(experience, None).info
    alpha = sac.temperatures.log_alpha["box"].exp()
    expected = sac.critic(experience.time_step.observation[1:], drawn.box).amin(0) - alpha * drawn.log_density
    torch.testing.assert_close(info.following.value, expected.detach())


@pytest.mark.parametrize("target_rate", [0.005, None])
def test_a_joint_pass_with_batch_norm_has_the_statistics_of_both_rows(target_rate):
    sac, experience = make(**NORMED, target_rate=target_rate), rows(BOX)
    step = experience.time_step
    torch.manual_seed(4)
    drawn = sac.policy(step.observation[1:], None).choose()
    boxes = torch.cat([experience.action[:1], drawn.box])
    moments = Moments()
    joint = sac.critic(step.observation, boxes, moments=moments)
    torch.manual_seed(4)
    info = sac.train_step(experience, None).info
    torch.testing.assert_close(info.q, joint[:, :1])
    target = joint if target_rate is None else sac.target_critic.network(step.observation, boxes, moments=Moments())
    alpha = sac.temperatures.log_alpha["box"].exp()
    torch.testing.assert_close(info.following.value, target[:, 1:].amin(0) - alpha * drawn.log_density)
    first = next(layer for layer in sac.critic.modules() if isinstance(layer, BatchNorm))
    both = torch.cat([step.observation, boxes], -1).reshape(-1, 5)
    torch.testing.assert_close(info.moments[first.mean][0, 0], 0.01 * both.mean(0).detach())


@pytest.mark.parametrize("always", [False, True])
def test_running_statistics_after_three_updates_are_those_by_hand(always):
    sac = make(**NORMED | {"kind": XQC if always else CrossQ}, target_rate=None, actor_period=2)
    learner, layers = learner_of(sac, learning_rate=0.0), dict(sac.named_modules())
    first, own = layers["critic.body.0"], layers["actor_mlp.0"]
    mean, variance, trained = torch.zeros(5), torch.ones(5), torch.zeros(3)
    for k in range(3):
        experience = rows(BOX, seed=k)
        torch.manual_seed(k)
        drawn = sac.policy(experience.time_step.observation[1:], None).choose().box.detach()
        observation = experience.time_step.observation
        x = torch.cat(
            [torch.cat([observation[0], experience.action[0]], -1), torch.cat([observation[1], drawn[0]], -1)]
        )
        mean, variance = 0.99 * mean + 0.01 * x.mean(0), 0.99 * variance + 0.01 * x.var(0, correction=0)
        if always or k == 1:  # the actor's turn
            trained = 0.99 * trained + 0.01 * observation[0].mean(0)
        torch.manual_seed(k)
        learner.train(chunk(experience))
        torch.testing.assert_close(first.mean, mean.expand(2, 1, 5))
        torch.testing.assert_close(first.variance, variance.expand(2, 1, 5))
        torch.testing.assert_close(own.mean, trained)


def test_an_update_that_is_skipped_does_not_change_running_statistics():
    sac = make(**NORMED, target_rate=None)
    learner = learner_of(sac)
    learner.train(chunk(rows(BOX)))
    before = copy.deepcopy(dict(sac.named_buffers()))
    broken = rows(BOX, seed=5)
    broken.time_step.reward[1, 2] = torch.nan
    learner.train(chunk(broken))
    for name, buffer in sac.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_evaluating_a_loss_changes_no_state():
    sac = make(**NORMED, target_rate=None)
    before = copy.deepcopy(sac.state_dict())
    (minibatches,) = chunk(rows(BOX))
    learner_of(sac).evaluate(minibatches.source)
    assert all(torch.equal(value, before[name]) for name, value in sac.state_dict().items() if torch.is_tensor(value))


def test_weights_of_unit_norm_keep_it_over_100_updates_and_biases_are_free():
    settings = {"norm": "batch", "bias": False, "unit_rows": True}
    sac = make(critic=functools.partial(CriticEnsemble, layers=(8, 6), **settings), kind=CrossQ,
               actor_mlp=functools.partial(MLP, layers=(8,), **settings))  # fmt: skip
    layers = {
        name: layer for name, layer in sac.named_modules() if isinstance(layer, UnitRows) and "target" not in name
    }
    assert len([name for name in layers if name.startswith("critic.")]) == 3 and has_batch_norm(sac.actor_mlp)

    def norms():
        return torch.cat([layer.weight.norm(dim=layer.input_dim).reshape(-1) for layer in layers.values()])

    torch.testing.assert_close(norms(), torch.ones_like(norms()))
    learner, before = learner_of(sac, learning_rate=0.01), copy.deepcopy(sac.state_dict())
    for k in range(100):
        learner.train(chunk(rows(BOX, seed=k)))
    torch.testing.assert_close(norms(), torch.ones_like(norms()))
    for name, layer in layers.items():
        assert not torch.equal(layer.weight, before[f"{name}.weight"]), name
    assert sac.critic.body[-1].bias.any()


@pytest.mark.parametrize("resumes", [False, True])
def test_an_actor_with_period_3_keeps_its_phase_after_a_resume(resumes):
    trained = []
    sac = make(**NORMED, target_rate=None, actor_period=3)
    learner = learner_of(sac)
    for k in range(9):
        if resumes and k == 4:
            state = copy.deepcopy(sac.state_dict()), copy.deepcopy(learner.state_dict())
            sac = make(**NORMED, target_rate=None, actor_period=3)
            learner = learner_of(sac)
            sac.load_state_dict(state[0]), learner.load_state_dict(state[1])
        before = [parameter.clone() for parameter in sac.actor_mlp.parameters()]
        learner.train(chunk(rows(BOX, seed=k)))
        trained.append(not all(torch.equal(a, b) for a, b in zip(before, sac.actor_mlp.parameters())))
    assert trained == [k % 3 == 2 for k in range(9)]


def test_the_actors_critics_use_running_statistics_and_take_no_gradient():
    sac, experience = make(**NORMED, target_rate=None), rows(BOX)
    found = losses_of(sac, experience)
    names = {id(buffer): name for name, buffer in sac.named_buffers()}
    assert {names[id(buffer)].split(".")[0] for buffer in found.buffers} == {"critic", "actor_mlp"}
    torch.manual_seed(3)
    info = sac.train_step(experience, None).info
    torch.manual_seed(3)
    sac.policy(experience.time_step.observation[1:], None).choose()
    choice = sac.policy_with_moments(experience.time_step.observation[:1], None, Moments()).choose()
    q = sac.critic(experience.time_step.observation[:1], choice.box).amin(0)
    alpha = sac.temperatures.log_alpha["box"].exp()
    torch.testing.assert_close(info.value, q - alpha * choice.log_density)


def test_acting_uses_running_statistics_whatever_the_batch():
    sac, experience = make(**NORMED), rows(BOX)
    step = experience.time_step._replace(observation=experience.time_step.observation[0])
    together = sac.predict_step(step, None).output
    alone = sac.predict_step(step._replace(observation=step.observation[:1]), None).output
    torch.testing.assert_close(together[:1], alone)
