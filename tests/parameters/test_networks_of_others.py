"""Networks of the user's own: what they return, and what torch does not find in them."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from alfish.algorithms.contract import check_registered
from alfish.algorithms.ppo import PPO
from alfish.errors import UsageError
from alfish.errors.user_code import CodeError
from alfish.networks import MLP, ActorCritic, Encoder, Torso
from alfish.parameters.parts import build

SPECS = spaces.Box(-1, 1, (3,)), spaces.Discrete(2), spaces.Box(-1, 1, ())


class Body(nn.Module):
    """Returns `output_size` features."""

    output_size = 8

    def __init__(self, input_size):
        super().__init__()
        self.layer = nn.Linear(input_size, 8)

    def forward(self, x):
        return self.layer(x)


class Fewer(Body):
    output_size = 6


class Pair(Body):
    def forward(self, x):
        return self.layer(x), None


class Double(Body):
    def forward(self, x):
        return self.layer(x).double()


class Raises(Body):
    def forward(self, x):
        raise KeyError("head")


class Lazy(Body):
    def __init__(self, input_size):
        super().__init__(input_size)
        self.layer = nn.LazyLinear(8)


def torso_of(body):
    return Torso(SPECS[0], mlp=body)


@pytest.mark.parametrize(
    "body, words",
    [
        (
            Fewer,
            r"made a Fewer, whose forward returned float32 \[2, 8\] for float32 \[2, 3\]; .* float32 \[2, 6\]",
        ),
        (Pair, r"made a Pair, whose forward returned a tuple for float32 \[2, 3\]; it must return float32 \[2, 8\]"),
        (Double, r"made a Double, whose forward returned float64 \[2, 8\] for float32"),
    ],
)
def test_a_network_that_returns_other_features_is_refused_where_it_is_built(body, words):
    with pytest.raises(UsageError, match=f"^Torso.mlp {words}"):
        torso_of(body)


class FirstDimension(Body):
    def forward(self, x):
        return self.layer(x.reshape(x.shape[0], -1))


class Camera(nn.Module):
    """Encodes images; layers that do not know their sizes get them from the first rows."""

    output_size = 4

    def __init__(self, space):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))

    def forward(self, image):
        leading = image.shape[:-3]
        return self.layers(image.reshape(-1, *image.shape[-3:]) / 255).reshape(*leading, -1)


class BatchOfCameras(Camera):
    def forward(self, image):
        return self.layers(image / 255)


def test_a_network_for_one_leading_dimension_is_refused_where_it_is_built():
    with pytest.raises(CodeError, match=r"the forward of Torso.mlp for float32 \[3, 2, 3\] raised RuntimeError"):
        torso_of(FirstDimension)
    image = spaces.Box(0, 255, (4, 5, 3), np.uint8)
    (camera,) = Encoder(image, image=Camera).encoders
    assert camera.layers[1].in_features == 60
    with pytest.raises(
        CodeError, match=r"the forward of Encoder.image for uint8 \[3, 2, 4, 5, 3\] raised RuntimeError"
    ):
        Encoder(image, image=BatchOfCameras)


def test_a_network_that_raises_is_named_by_its_setting():
    with pytest.raises(CodeError, match=r"^the forward of Torso.mlp for float32 \[2, 3\] raised KeyError: 'head' \("):
        torso_of(Raises)


def test_first_call_sizes_lazy_layers_without_side_effects():
    torch.manual_seed(0)
    Body(3)
    expected = torch.rand(1)
    torch.manual_seed(0)
    torso = torso_of(Body)
    assert torch.rand(1) == expected and torso.mlp.layer.training
    assert torso_of(Lazy).mlp.layer.weight.shape == (8, 3)


def hidden(kind):
    class Hidden(Body):
        def __init__(self, input_size):
            super().__init__(input_size)
            other = nn.Linear(8, 8)
            kinds = {"list": [other], "dict": {"a": other}, "tensor": torch.zeros(8, requires_grad=True)}
            frozen = nn.Linear(8, 8).requires_grad_(False)
            self.other = {**kinds, "frozen": [frozen], "same": [self.layer], "numbers": [1, "a", None]}[kind]

    return PPO(*SPECS, network=functools.partial(ActorCritic, actor_torso=functools.partial(Torso, mlp=Hidden)))


@pytest.mark.parametrize("kind", ["list", "dict", "tensor"])
def test_parameters_that_would_not_be_trained_or_saved_are_refused(kind):
    what = r"a tensor of shape \[8\]" if kind == "tensor" else r"a module \(Linear\)"
    with pytest.raises(UsageError, match=rf"^PPO.network.actor_torso.mlp.other has {what}.*neither trained nor saved"):
        check_registered(hidden(kind))


@pytest.mark.parametrize("kind", ["frozen", "same", "numbers"])
def test_attributes_without_further_trainable_parameters_are_accepted(kind):
    check_registered(hidden(kind))


def test_a_constructor_that_skips_its_base_class_is_named():
    class Bare(nn.Module):
        def __init__(self):
            pass

    with pytest.raises(UsageError, match="^the constructor of Bare does not call super"):
        build(Bare, nn.Module, "Trainer.algorithm")


def test_a_function_instead_of_a_layer_is_refused_with_a_remedy():
    with pytest.raises(UsageError, match="^MLP.activation cannot be called .*; give a class, or a function that makes"):
        MLP(3, activation=lambda x: x)
