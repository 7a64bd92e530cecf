"""Batch norm: which statistics a pass uses, what it collects, and who may have it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

from alfish import specs
from alfish.algorithms.crossq import CrossQ
from alfish.algorithms.dqn import DQN
from alfish.algorithms.recurrent_sac import RecurrentSAC
from alfish.algorithms.retrace import RetraceSAC
from alfish.algorithms.sac import SAC
from alfish.errors import UsageError
from alfish.learner.learner import Learner
from alfish.learner.updates import write_buffers
from alfish.networks import MLP, CriticEnsemble, QNetwork, SquashedNormalHead, Torso
from alfish.networks.bodies.batch_norm import BatchNorm, Moments
from alfish.networks.bodies.residual import Residual

VECTOR = spaces.Box(-1, 1, (4,))


class NormedEncoder(torch.nn.Module):
    """An encoder with batch norm."""

    def __init__(self, spec):
        super().__init__()
        self.mlp, self.output_size = MLP(spec.shape[0], (8,), norm="batch"), 8

    def forward(self, observation):
        return self.mlp(observation)


def test_with_moments_gradients_pass_through_batch_statistics():
    layer, x = BatchNorm(3, eps=1e-5), (5 + 2 * torch.randn(2, 4, 3)).requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        layer.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    found, other = layer(x, Moments()), x.detach().clone().requires_grad_()
    expected = F.batch_norm(other.reshape(8, 3), None, None, layer.weight, layer.bias, True, 0.0, 1e-5).reshape(2, 4, 3)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    (found * weights).sum().backward(), (expected * weights).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_without_moments_running_statistics_normalize():
    layer, x = BatchNorm(3, eps=1e-5), torch.randn(4, 3)
    layer.mean.copy_(torch.tensor([1.0, 2.0, 3.0])), layer.variance.copy_(torch.tensor([4.0, 5.0, 6.0]))
    expected = F.batch_norm(x, layer.mean, layer.variance, None, None, False, 0.0, 1e-5)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.eval()(x), expected)


def test_moments_collect_new_running_statistics_and_write_none():
    layer, moments, x = BatchNorm(2, rate=0.25), Moments(), torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    layer(x, moments)
    assert torch.equal(layer.mean, torch.zeros(2)) and torch.equal(layer.variance, torch.ones(2))
    assert torch.allclose(moments[layer.mean], torch.tensor([0.5, 0.5]))
    assert torch.allclose(moments[layer.variance], torch.tensor([1.0, 1.75]))  # biased variances 1 and 4
    assert not any(value.requires_grad for value in moments.values())


def test_each_critic_has_statistics_of_its_own():
    torch.manual_seed(0)
    critic = CriticEnsemble(VECTOR, 2, ensemble_size=3, layers=(8, 6), norm="batch", norm_after=True)
    x, action = torch.randn(1, 10, 4), torch.randn(1, 10, 2)
    moments = Moments()
    together = critic(x, action, moments=moments)
    assert together.shape == (3, 1, 10) and len(moments) == 2 * 3
    for e in range(3):
        h = torch.cat([x, action], -1)[0]
        for module in critic.body:
            if isinstance(module, BatchNorm):
                h = F.batch_norm(h, None, None, module.weight[e, 0], module.bias[e, 0], True, 0.0, 1e-3)
                assert moments[module.mean].shape == module.mean.shape
            else:
                h = torch.relu(h) if not hasattr(module, "weight") else h @ module.weight[e] + module.bias[e]
        torch.testing.assert_close(together[e, 0], h[:, 0], atol=1e-4, rtol=1e-4)


def test_an_ensemble_equals_its_critics_with_running_statistics():
    torch.manual_seed(0)
    critic = CriticEnsemble(VECTOR, 2, ensemble_size=3, layers=(8,), norm="batch")
    for buffer in critic.buffers():
        buffer.uniform_(0.5, 2)
    q = critic(torch.randn(5, 4), torch.randn(5, 2))
    assert q.shape == (3, 5) and torch.unique(q).numel() == 15
    x, action = torch.randn(5, 4), torch.randn(5, 2)
    assert torch.equal(critic(x, action, num_members=2), critic(x, action)[:2])


@pytest.mark.parametrize(
    ("algorithm", "action", "name"),
    [
        (functools.partial(DQN, q_network=functools.partial(
            QNetwork, torso=functools.partial(Torso, mlp=functools.partial(MLP, norm="batch")))),
         spaces.Discrete(2), "q_network.torso.mlp.0"),
        (functools.partial(RecurrentSAC, actor_mlp=functools.partial(MLP, norm="batch")), VECTOR, "actor_mlp.0"),
        (functools.partial(SAC, actor_encoder=NormedEncoder), VECTOR, "actor_encoder.mlp.0"),
        (functools.partial(CrossQ, actor_encoder=NormedEncoder), VECTOR, "actor_encoder.mlp.0"),
        (functools.partial(DQN, q_network=functools.partial(
            QNetwork, torso=functools.partial(Torso, mlp=Residual))),
         spaces.Discrete(2), "q_network.torso.mlp.input_norm"),
    ],
)  # fmt: skip
def test_batch_norm_is_refused_without_updates_of_its_statistics(algorithm, action, name):
    made = algorithm(specs.observation_spec(VECTOR), specs.action_spec(action), specs.reward_spec())
    with pytest.raises(UsageError, match=f"{name} of {type(made).__name__} is a batch norm.* norm to 'layer'"):
        Learner(made)


@pytest.mark.parametrize("kind", [SAC, RetraceSAC, RecurrentSAC])
def test_critics_with_batch_norm_need_a_joint_pass(kind):
    critic = functools.partial(CriticEnsemble, norm="batch")
    made = kind(specs.observation_spec(VECTOR), VECTOR, specs.reward_spec(), critic=critic)
    with pytest.raises(
        UsageError, match="critic.body.0 of .* is a batch norm .*: only CrossQ, XQC and FlashSAC update them"
    ):
        Learner(made)


def test_custom_batch_norm_networks_must_accept_moments():
    class Own(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.norm, self.output_size = BatchNorm(size), size

        def forward(self, x):
            return self.norm(x)

    with pytest.raises(UsageError, match=r"actor_mlp, with batch norm, made an Own, whose forward takes \(x\); it is"):
        CrossQ(VECTOR, VECTOR, specs.reward_spec(), actor_mlp=Own)


def test_a_smooth_log_deviation_always_has_a_gradient():
    head = SquashedNormalHead(3, 2, min_log_std=-10.0, max_log_std=2.0, log_std="tanh", unit_rows=True)
    torch.testing.assert_close(head.linear.weight.norm(dim=1), torch.ones(4))
    features = torch.randn(50, 3)
    x = head.linear(features).chunk(2, -1)[1]
    log_std = head(features).log_std
    torch.testing.assert_close(log_std, -4 + 6 * torch.tanh(x))
    (gradient,) = torch.autograd.grad(log_std.sum(), head.linear.bias)
    assert (gradient[2:] > 0).all() and float(log_std.detach().min()) > -10 and float(log_std.detach().max()) < 2
    rows = SquashedNormalHead(3, 2, gain=0.0, unit_rows=True).linear.weight
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))


def test_a_value_with_another_shape_than_its_buffer_is_refused():
    layer = BatchNorm(3)
    with pytest.raises(UsageError, match=r"LossInfo.buffers has a value of shape \[\] for a buffer of shape \[3\]"):
        write_buffers({layer.mean: torch.zeros(())}, None)
