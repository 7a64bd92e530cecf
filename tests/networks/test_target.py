import io

import pytest
import torch
from torch import nn

from alfish.errors import UsageError
from alfish.networks import TargetNetwork
from alfish.networks.target import lay_side_by_side, vector_of


class Scaled(nn.Module):
    """A parameter and a buffer."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(value)))
        self.register_buffer("count", torch.tensor(float(value)))

    def forward(self, x, y=0):
        return self.weight * x + y


def moved(online, value):
    with torch.no_grad():
        online.weight.fill_(value)
        online.count.fill_(value)


def values(target):
    return target.network.weight.tolist() + [float(target.network.count)]


def test_it_follows_without_gradients():
    online = nn.Linear(2, 2)  # whose parameters do not lie side by side
    target = TargetNetwork(online, rate=0.5)
    target.update(online)
    assert not any(parameter.requires_grad or parameter.grad_fn for parameter in target.parameters())


def test_it_starts_as_a_copy_and_stays_until_it_follows():
    online = Scaled(1)
    target = TargetNetwork(online)
    moved(online, 5)
    assert values(target) == [1, 1, 1]
    assert target(torch.ones(2), 3).tolist() == [4, 4]


def test_copies_only_at_every_period_th_update():
    online = Scaled(0)
    target = TargetNetwork(online, period=3)
    seen = []
    for update in range(1, 8):
        moved(online, update)
        target.update(online)
        seen.append(float(target.network.weight[0]))
    assert seen == [0, 0, 3, 3, 3, 6, 6]


def test_it_moves_by_its_rate_and_copies_buffers():
    online = Scaled(0)
    target = TargetNetwork(online, rate=0.25)
    moved(online, 16)
    target.update(online)
    assert values(target) == [4, 4, 16]
    target.update(online)
    assert values(target) == [7, 7, 16]


def test_rate_and_period_together():
    online = Scaled(0)
    target = TargetNetwork(online, rate=0.5, period=2)
    moved(online, 8)
    seen = []
    for _ in range(4):
        target.update(online)
        seen.append(float(target.network.weight[0]))
    assert seen == [0, 4, 4, 6]


def layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def state(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("rate", [0.25, 1.0])
def test_it_follows_wherever_parameters_lie(rate):
    """Side by side in one vector, then each by itself, and another network's."""
    online, other = layers(0), layers(1)
    target = TargetNetwork(online, rate)
    expected = state(online)
    backwards = list(reversed(list(other.parameters())))

    def part():
        for parameter in online.parameters():
            parameter.data = parameter.data.clone()

    for followed, move in [
        (online, lambda: lay_side_by_side(list(online.parameters()))),
        (online, part),
        (online, lambda: None),
        (other, lambda: None),
        (other, lambda: lay_side_by_side(backwards)),
        (online, lambda: None),
    ]:
        move()
        for _ in range(2):
            with torch.no_grad():
                for parameter in followed.parameters():
                    parameter.add_(torch.randn_like(parameter))
            target.update(followed)
            expected = [old.lerp(new, rate) for old, new in zip(expected, followed.parameters())]
            for found, wanted in zip(state(target), expected, strict=True):
                torch.testing.assert_close(found, wanted)


def test_target_parameters_are_one_vector_that_follows_one_vector():
    online = layers(0)
    target = TargetNetwork(online)
    assert vector_of(list(target.network.parameters())) is not None
    assert vector_of(list(online.parameters())) is None
    vector = lay_side_by_side(list(online.parameters()))
    assert torch.equal(vector_of(list(online.parameters())), vector)
    vector.fill_(3.0)
    target.update(online)
    assert all((parameter == 3).all() for parameter in target.parameters())
    assert vector_of(list(online.parameters())[::2]) is None and vector_of([]) is None


def test_updating_the_target_does_not_change_the_online_network():
    online = Scaled(2)
    target = TargetNetwork(online, rate=0.5)
    moved(online, 6)
    target.update(online)
    assert online.weight.tolist() == [6, 6] and online.weight.requires_grad
    moved(online, 100)  # no memory is shared
    assert values(target)[:2] == [4, 4]


def test_targets_have_no_gradient_and_pass_none_on():
    online = Scaled(2)
    target = TargetNetwork(online, rate=0.5)
    assert not any(parameter.requires_grad for parameter in target.parameters())
    x = torch.ones(2, requires_grad=True)
    (target(x) * online(x)).sum().backward()
    assert target.network.weight.grad is None and (online.weight.grad != 0).all()
    target.update(online)
    assert target.network.weight.grad_fn is None


def test_a_restored_target_keeps_its_place_in_the_period():
    online = Scaled(0)
    target, resumed = TargetNetwork(online, period=3), TargetNetwork(online, period=3)
    moved(online, 1)
    for _ in range(2):
        target.update(online)
    file = io.BytesIO()
    torch.save(target.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for one in (target, resumed):
        one.update(online)
        assert values(one) == [1, 1, 1]


@pytest.mark.parametrize(("rate", "period"), [(0, 1), (-0.1, 1), (1.1, 1), (1, 0)])
def test_a_rate_outside_0_to_1_and_a_period_below_1_are_refused(rate, period):
    with pytest.raises(UsageError, match=f"got {rate}, {period}"):
        TargetNetwork(Scaled(0), rate, period)
