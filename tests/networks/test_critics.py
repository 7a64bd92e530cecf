"""Q networks and ensembles against single networks put together by hand from the same weights."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import nn

from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.networks import CriticEnsemble, QNetwork
from alfish.networks.critics import EnsembleLinear

OBSERVATION = spaces.Box(-1, 1, (3,), np.float32)


def make(**settings):
    torch.manual_seed(0)
    return CriticEnsemble(OBSERVATION, 2, **{"ensemble_size": 4, "layers": (8, 6), **settings})


def inputs(*leading):
    return torch.randn(*leading, 3), torch.randn(*leading, 2)


def test_each_critic_is_a_network_of_its_own_weights():
    critic = make()
    observation, action = inputs(5)
    q = critic(observation, action)
    assert q.shape == (4, 5)
    layers = [layer for layer in critic.body if isinstance(layer, EnsembleLinear)]
    for e in range(4):
        x = torch.cat([observation, action], -1)
        for layer in layers[:-1]:
            x = F.relu(F.linear(x, layer.weight[e].T, layer.bias[e, 0]))
        expected = F.linear(x, layers[-1].weight[e].T, layers[-1].bias[e, 0]).squeeze(-1)
        torch.testing.assert_close(q[e], expected)
    assert len({round(float(row[0].detach()), 6) for row in q}) == 4  # initialised differently


@pytest.mark.parametrize(
    "settings", [{}, {"norm": "layer"}, {"norm": "batch"}, {"num_outputs": 3}, {"activation": "elu"}]
)
def test_one_critics_loss_moves_no_other_critic(settings):
    critic = make(**settings)
    observation, action = inputs(7)
    before = critic(observation, action)
    parameters = list(critic.parameters())
    gradients = torch.autograd.grad(critic(observation, action)[1].square().sum(), parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients):
            parameter -= 0.1 * gradient
    after = critic(observation, action)
    for e in (0, 2, 3):
        assert torch.equal(after[e], before[e]), f"critic {e} moved with critic 1"
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("leading", [(), (5,), (2, 5), (1, 1)])
@pytest.mark.parametrize(("num_outputs", "tail"), [(1, ()), (3, (3,))])
def test_leading_dimensions_are_kept_and_do_not_change_a_row(leading, num_outputs, tail):
    critic = make(num_outputs=num_outputs)
    observation, action = inputs(*leading)
    q = critic(observation, action)
    assert q.shape == (4, *leading, *tail)
    flat = critic(observation.reshape(-1, 3), action.reshape(-1, 2))
    torch.testing.assert_close(q.reshape(flat.shape), flat)


def test_without_actions_it_values_every_discrete_action():
    torch.manual_seed(0)
    critic = CriticEnsemble(OBSERVATION, 0, num_outputs=4)
    assert critic(torch.zeros(6, 3)).shape == (2, 6, 4)


def test_the_action_is_an_input_with_a_gradient():
    critic = make()
    observation, action = inputs(5)
    action.requires_grad_()
    critic(observation, action).sum().backward()
    assert (action.grad != 0).all()


def test_layer_norm_normalises_the_features_of_every_hidden_layer():
    """Scaling a hidden layer's weights changes nothing behind the norm."""
    observation, action = inputs(5)
    for norm in ("layer", None):
        critic = make(norm=norm)
        before = critic(observation, action)
        with torch.no_grad():
            for layer in [layer for layer in critic.body if isinstance(layer, EnsembleLinear)][:-1]:
                layer.weight *= 50
                layer.bias *= 50
        unchanged = torch.allclose(critic(observation, action), before, atol=0.05)
        assert unchanged == (norm is not None)


def test_dropout_is_active_only_in_training_and_independent_for_each_critic():
    critic = make(dropout=0.5)
    assert sum(isinstance(layer, nn.Dropout) for layer in critic.body) == 2
    observation, action = inputs(5)
    assert not torch.equal(critic(observation, action), critic(observation, action))
    critic.eval()
    assert torch.equal(critic(observation, action), critic(observation, action))
    assert torch.equal(critic(observation, action), make()(observation, action))


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(UsageError, match="CriticEnsemble.activation is 'swish'"):
        make(activation="swish")


def test_a_dueling_network_is_value_plus_advantage_less_its_mean():
    torch.manual_seed(0)
    network = QNetwork(OBSERVATION, 4, dueling=True)
    time_step = TimeStep(None, None, None, torch.randn(2, 5, 3), None, None)
    features, _ = network.torso(time_step, None)
    value, advantage = network.value(features), network.advantage(features)
    q, _ = network(time_step, None)
    assert q.shape == (2, 5, 4)
    torch.testing.assert_close(q, value + (advantage - advantage.mean(-1, keepdim=True)))
    torch.testing.assert_close(q.mean(-1, keepdim=True), value)
    assert torch.equal(q.argmax(-1), advantage.argmax(-1))


def test_without_dueling_there_is_no_value_layer():
    torch.manual_seed(0)
    network = QNetwork(OBSERVATION, 4)
    time_step = TimeStep(None, None, None, torch.randn(5, 3), None, None)
    features, _ = network.torso(time_step, None)
    assert torch.equal(network(time_step, None)[0], network.advantage(features))
    assert not any(name.startswith("value") for name, _ in network.named_parameters())
