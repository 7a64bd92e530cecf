import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.functional.distributions import Bernoulli, Categorical, DiagonalNormal, Joint, MultiCategorical
from alfish.networks import MLP, ActorCritic, Encoder, Flat, ImpalaCNN, NatureCNN, OneHot, PolicyHead, SmallCNN, Torso
from alfish.networks.hybrid import SquashedNormalHead
from alfish.networks.images import is_image
from alfish.networks.layers import NoisyLinear, RMSNorm, Tanh

OBSERVATIONS = {
    "vector": spaces.Box(-1, 1, (4,), np.float32),
    "0-d": spaces.Box(-1, 1, (), np.float32),
    "matrix": spaces.Box(-1, 1, (3, 5), np.float32),
    "integers": spaces.Box(0, 9, (4,), np.int32),
    "bytes": spaces.Box(0, 255, (4,), np.uint8),
    "discrete": spaces.Discrete(3),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "2-d multi-discrete": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "bits": spaces.MultiBinary(3),
    "2-d bits": spaces.MultiBinary([2, 2]),
    "image": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "image, channels first": spaces.Box(0, 255, (3, 36, 40), np.uint8),
    "float image": spaces.Box(0, 1, (36, 36, 1), np.float32),
    "nested": spaces.Dict(
        image=spaces.Box(0, 255, (36, 36, 1), np.uint8),
        rest=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3, start=2)]),
        bits=spaces.MultiBinary(2),
    ),
}
SIZES = {"vector": 4, "0-d": 1, "matrix": 15, "integers": 4, "bytes": 4, "discrete": 3, "multi-discrete": 5,
         "2-d multi-discrete": 14, "bits": 3, "2-d bits": 4, "image": 512, "image, channels first": 512,
         "float image": 512, "nested": 2 + 512 + 2 + 3}  # fmt: skip
ACTIONS = {
    "discrete": (spaces.Discrete(3, start=1), Categorical),
    "box": (spaces.Box(-2, 2, (2,), np.float32), DiagonalNormal),
    "0-d box": (spaces.Box(-2, 2, (), np.float32), DiagonalNormal),
    "multi-discrete": (spaces.MultiDiscrete([2, 3]), MultiCategorical),
    "bits": (spaces.MultiBinary(3), Bernoulli),
    "nested": (spaces.Dict(b=spaces.Discrete(2), a=spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(5)])), Joint),
}


def _sample(space, leading, seed=0):
    """Observations of the stream, `[*leading, ...]`."""
    spec = specs.observation_spec(space)
    generator = np.random.default_rng(seed)

    def draw(leaf):
        shape = (*leading, *leaf.shape)
        if isinstance(leaf, spaces.Box):
            if leaf.dtype == np.float32:
                return torch.as_tensor(generator.standard_normal(shape), dtype=torch.float32)
            return torch.as_tensor(generator.integers(leaf.low, leaf.high + 1.0, shape).astype(leaf.dtype))
        high = leaf.n if isinstance(leaf, spaces.Discrete) else getattr(leaf, "nvec", 2)
        return torch.as_tensor(generator.integers(high, size=shape)).to(specs.torch_dtype(leaf))

    return nest.map(draw, spec)


def _seen(observation):
    return TimeStep(None, None, None, observation, None, None)


@pytest.mark.parametrize("leading", [(2,), (3, 2), (1, 6), (6,)])
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_an_encoder_keeps_the_leading_dims(name, leading):
    encoder = Encoder(specs.observation_spec(OBSERVATIONS[name]))
    features = encoder(_sample(OBSERVATIONS[name], leading))
    assert features.shape == (*leading, SIZES[name])
    assert features.dtype == torch.float32
    assert encoder.output_size == SIZES[name]


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_a_row_is_encoded_the_same_whatever_its_leading_dims(name):
    torch.manual_seed(0)
    torso = Torso(specs.observation_spec(OBSERVATIONS[name]))
    rows = _sample(OBSERVATIONS[name], (3, 2))
    flat = nest.map(lambda leaf: leaf.flatten(0, 1), rows)
    one = nest.map(lambda leaf: leaf[1, 1][None], rows)
    features, of_flat, of_one = (torso(_seen(each), None)[0] for each in (rows, flat, one))
    torch.testing.assert_close(features.flatten(0, 1), of_flat)
    torch.testing.assert_close(features[1, 1], of_one[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), 255, 1.0),
        (spaces.Box(0, 15, (2,), np.uint8), 15, 1.0),
        (spaces.Box(0, 100, (2,), np.int64), 25, 0.25),
        (spaces.Box(-1000, 1, (2,), np.int32), -1000, -1.0),
        (spaces.Box(-5, 10, (2,), np.int8), -5, -0.5),
        (spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (2,), np.int64), 7, 7.0),
        (spaces.Box(-np.inf, np.inf, (2,), np.int16), 300, 300.0),
        (spaces.Box(0, np.inf, (2,), np.int8), 5, 5.0),
        (spaces.Box(0, 255, (2,), np.float32), 255, 255.0),
    ],
)
def test_only_integers_are_scaled_by_their_largest_value(space, value, expected):
    leaf = torch.full((1, 2), value, dtype=specs.torch_dtype(space))
    assert Flat(space)(leaf).tolist() == [pytest.approx([expected, expected])]


def test_each_entry_of_a_flat_leaf_is_scaled_by_its_own_bound():
    low, high = np.array([0, -4, 0, 0]), np.array([1, 2, 10**6, np.iinfo(np.int64).max])
    flat = Flat(spaces.Box(low, high, dtype=np.int64))
    assert flat(torch.tensor([[1, 2, 10**6, 7]])).tolist() == [[1.0, 0.5, 1.0, 7.0]]
    assert not flat.state_dict()
    table = Flat(spaces.Box(np.zeros((2, 2), np.int8), np.array([[1, 2], [4, 8]], np.int8), dtype=np.int8))
    assert table(torch.tensor([[[1, 1], [1, 1]]], dtype=torch.int8)).tolist() == [[1.0, 0.5, 0.25, 0.125]]


@pytest.mark.parametrize("cnn", [NatureCNN, ImpalaCNN, SmallCNN])
@pytest.mark.parametrize("high, dtype", [(255, np.uint8), (100, np.uint8), (255, np.float32)])
def test_an_image_reaches_the_convolutions_between_zero_and_one(cnn, high, dtype):
    seen = []
    encoder = cnn(spaces.Box(0, high, (36, 36, 1), dtype))
    encoder.body.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    encoder(torch.full((2, 36, 36, 1), high, dtype=torch.uint8 if dtype == np.uint8 else torch.float32))
    assert seen[0].shape == (2, 1, 36, 36)
    torch.testing.assert_close(seen[0], torch.ones(2, 1, 36, 36))


@pytest.mark.parametrize("cnn", [NatureCNN, ImpalaCNN, SmallCNN])
def test_channels_first_and_last_are_the_same_image(cnn):
    torch.manual_seed(0)
    last = cnn(spaces.Box(0, 255, (36, 40, 3), np.uint8))
    first = cnn(spaces.Box(0, 255, (3, 36, 40), np.uint8))
    first.load_state_dict(last.state_dict())
    images = _sample(OBSERVATIONS["image"], (2, 3))
    assert last.image_shape == first.image_shape == (3, 36, 40)
    torch.testing.assert_close(last(images), first(images.movedim(-1, -3)))


def test_a_leaf_is_an_image_by_its_shape_and_dtype():
    assert is_image(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    assert is_image(spaces.Box(0, 255, (10, 10, 3), np.uint8))
    assert is_image(spaces.Box(-1, 1, (3, 64, 48), np.float32))
    assert not is_image(spaces.Box(-1, 1, (3, 8, 8), np.float32))
    assert not is_image(spaces.Discrete(3))
    assert is_image(spaces.Box(0, 255, (84, 84), np.uint8)) and is_image(spaces.Box(0, 255, (8, 8), np.float32))
    assert not is_image(spaces.Box(0, 255, (7, 84), np.uint8)) and not is_image(spaces.Box(0, 1, (84, 84), np.float32))
    assert is_image(spaces.Box(0, 255, (4, 10, 10, 3), np.uint8))
    assert is_image(spaces.Box(0, 255, (3, 8, 8), np.float32))
    assert not is_image(spaces.Box(0, 255, (64,), np.uint8))


@pytest.mark.parametrize(("shape", "channels"), [((14, 11), 1), ((4, 14, 11, 3), 12), ((4, 3, 14, 11), 12)])
def test_grey_images_and_stacks_have_the_channels_of_one_image(shape, channels):
    space = spaces.Box(0, 255, shape, np.uint8)
    torch.manual_seed(0)
    (encoder,) = Encoder(space).encoders
    assert isinstance(encoder, SmallCNN) and encoder.image_shape == (channels, 14, 11)
    leaf = torch.randint(256, (5, 2, *shape), dtype=torch.uint8)
    frames = leaf if len(shape) == 2 else leaf.movedim(-1, -3) if shape[-1] == 3 else leaf
    plain = SmallCNN(spaces.Box(0, 255, (14, 11, channels), np.uint8))
    plain.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(encoder(leaf), plain(frames.reshape(5, 2, channels, 14, 11).movedim(-3, -1)))


@pytest.mark.parametrize(
    ("shape", "most"),
    [((32, 32, 3), 100_000), ((20, 200, 3), 400_000), ((64, 64, 3), 700_000), ((84, 84, 4), 1_690_000)]
    + [((96, 96, 3), 2_200_000), ((210, 160, 3), 1_690_000), ((480, 640, 3), 1_690_000), ((35, 35, 1), 120_000)],
)
def test_the_encoder_of_any_image_has_a_sensible_size(shape, most):
    encoder = Encoder(spaces.Box(0, 255, shape, np.uint8))
    assert 0.3 * most < sum(parameter.numel() for parameter in encoder.parameters()) < most


@pytest.mark.parametrize(
    ("shape", "kernel", "size"),
    [((3, 3), 3, (3, 3)), ((14, 14), 3, (14, 14)), ((15, 15), 4, (4, 4)), ((24, 33), 4, (6, 9)), ((35, 2), 4, (9, 1))],
)
def test_the_first_convolution_of_a_small_image_reads_every_pixel(shape, kernel, size):
    first = SmallCNN(spaces.Box(0, 255, (*shape, 3), np.uint8)).body[0][0]
    assert first.kernel_size == (kernel, kernel)
    image = torch.zeros(1, 3, *shape, requires_grad=True)
    features = first(image)
    assert features.shape == (1, 16, *size)
    (gradient,) = torch.autograd.grad(features.square().sum() + features.sum(), image)
    assert (gradient != 0).any(1).all()


def test_actor_and_critic_share_the_torso_of_an_image_unless_they_differ():
    image, vector = spaces.Box(0, 255, (10, 10, 3), np.uint8), spaces.Box(-1, 1, (3,))
    own = partial(Torso, mlp=partial(MLP, layers=(4,)))
    for spec, options, shares in (
        (image, {}, True),
        ({"camera": image, "speed": vector}, {}, True),
        (vector, {}, False),
        (image, {"critic_torso": own}, False),
        (image, {"actor_torso": own, "critic_torso": own}, False),
        (image, {"actor_torso": own, "critic_torso": own, "shared_torso": True}, True),
        (image, {"shared_torso": False}, False),
        (vector, {"shared_torso": True}, True),
    ):
        network = ActorCritic(spec, spaces.Discrete(2), specs.reward_spec(), **options)
        assert (network.critic_torso is None) == shares, options


def test_policy_features_are_returned_with_policy_and_value():
    spec, step = spaces.Box(-1, 1, (3,)), TimeStep(*[None] * 3, torch.rand(5, 3), None, None)
    for shared_torso in (True, False):
        network = ActorCritic(spec, spaces.Discrete(2), specs.reward_spec(), shared_torso=shared_torso)
        (policy, value, features), _ = network(step, None)
        assert torch.equal(features, network.actor_torso(step, None)[0])
        assert torch.equal(policy.mode(), network.policy(step, None)[0].mode())
        assert torch.equal(value, network.value(step, None))


def test_digits_become_one_hot_codes_side_by_side():
    code = OneHot(spaces.MultiDiscrete([2, 3]))(torch.tensor([[1, 0], [0, 2]]))
    assert code.tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
    assert OneHot(spaces.Discrete(3))(torch.tensor([2, 3])).tolist() == [[0, 0, 1], [0, 0, 0]]


def test_features_are_in_the_order_of_the_leaves():
    spec = {"b": spaces.Discrete(2), "a": spaces.Box(-1, 1, (1,), np.float32)}
    features = Encoder(spec)({"a": torch.tensor([[0.5]]), "b": torch.tensor([1])})
    assert features.tolist() == [[0.5, 0, 1]]


class _Tripled(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.output_size = int(np.prod(spec.shape))

    def forward(self, leaf):
        return 3 * leaf.float()


def test_a_leaf_may_have_an_encoder_of_its_own():
    spec = specs.observation_spec(spaces.Dict(a=spaces.Tuple([OBSERVATIONS["vector"]]), b=OBSERVATIONS["vector"]))
    encoder = Encoder(spec, leaves={"a.0": _Tripled})
    features = encoder({"a": (torch.ones(2, 4),), "b": torch.ones(2, 4)})
    assert features.tolist() == [[3.0] * 4 + [1.0] * 4] * 2


def test_the_path_of_a_dict_names_all_leaves_in_it():
    spec = specs.observation_spec(spaces.Dict(a=spaces.Dict(x=OBSERVATIONS["vector"], y=OBSERVATIONS["vector"]),
                                              ab=OBSERVATIONS["vector"]))  # fmt: skip
    rows = {"a": {"x": torch.ones(1, 4), "y": torch.ones(1, 4)}, "ab": torch.ones(1, 4)}
    assert Encoder(spec, leaves={"a": None})(rows).tolist() == [[1.0] * 4]
    assert Encoder(spec, leaves={"a.y": _Tripled, "a": None})(rows).tolist() == [[3.0] * 4 + [1.0] * 4]


def test_features_do_not_depend_on_a_dropped_leaf():
    spec = {"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Discrete(3), "c": spaces.Box(-1, 1, (1,), np.float32)}
    encoder = Encoder(spec, leaves={"b": None, "c": _Tripled})
    assert encoder.output_size == 3 and len(encoder.encoders) == 2
    for b in range(3):
        rows = {"a": torch.ones(1, 2), "b": torch.tensor([b]), "c": torch.ones(1, 1)}
        assert encoder(rows).tolist() == [[1, 1, 3]]


@pytest.mark.parametrize("spec", [spaces.Box(-1, 1, (2,)), {"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (2,))}])
def test_an_encoder_without_any_leaf_is_refused(spec):
    paths = nest.paths(spec)
    with pytest.raises(UsageError, match=re.escape(f"drops every leaf of the observation, {paths}; keep at least one")):
        Encoder(spec, leaves=dict.fromkeys(paths))


def test_the_bare_leafs_path_is_empty():
    encoder = Encoder(OBSERVATIONS["vector"], leaves={"": _Tripled})
    assert encoder(torch.ones(1, 4)).tolist() == [[3.0] * 4]


def test_kinds_of_leaves_may_have_other_encoders():
    encoder = Encoder(specs.observation_spec(OBSERVATIONS["nested"]), image=Flat, vector=_Tripled, discrete=OneHot)
    assert [type(each) for each in encoder.encoders] == [_Tripled, Flat, _Tripled, OneHot]
    assert Encoder(OBSERVATIONS["vector"], vector=_Tripled)(torch.ones(1, 4)).tolist() == [[3.0] * 4]


def test_an_encoder_for_a_missing_leaf_is_named():
    with pytest.raises(UsageError, match=r"'camera\.left'.*\['bits', 'image', 'rest\.0', 'rest\.1'\]"):
        Encoder(specs.observation_spec(OBSERVATIONS["nested"]), leaves={"camera.left": Flat})


def test_images_that_do_not_fit_are_refused_with_a_remedy():
    with pytest.raises(UsageError, match=r"36 x 36.*got 10 x 12.*SmallCNN, ImpalaCNN or Flat"):
        NatureCNN(spaces.Box(0, 255, (10, 12, 3), np.uint8))
    assert ImpalaCNN(spaces.Box(0, 255, (10, 12, 3), np.uint8)).output_size == 256
    with pytest.raises(UsageError, match="ImpalaCNN encodes images"):
        ImpalaCNN(spaces.Box(0, 255, (10,), np.uint8))


@pytest.mark.parametrize("leading", [(2,), (3, 2), (1, 6)])
@pytest.mark.parametrize("name", ACTIONS)
def test_a_policy_head_gives_the_actions_distribution(name, leading):
    space, kind = ACTIONS[name]
    spec = specs.action_spec(space)
    distribution = PolicyHead(7, spec)(torch.randn(*leading, 7))
    assert isinstance(distribution, kind)
    action = distribution.sample()
    assert nest.paths(action) == nest.paths(spec)
    for leaf, leaf_spec in zip(nest.leaves(action), nest.leaves(spec)):
        assert leaf.shape == (*leading, *leaf_spec.shape)
        assert leaf.dtype == specs.torch_dtype(leaf_spec)
    assert distribution.log_prob(action).shape == leading


def test_parts_of_a_nested_policy_belong_to_their_own_leaves():
    """A dict keeps its order of insertion, a nest its order of keys: the heads must not be mixed up."""
    spec = {"b": spaces.Discrete(2), "a": spaces.Discrete(5)}
    joint = PolicyHead(3, spec)(torch.zeros(4, 3))
    assert joint.parts["b"].log_p.shape == (4, 2)
    assert joint.parts["a"].log_p.shape == (4, 5)


@pytest.mark.parametrize("name", ACTIONS)
def test_the_first_policy_is_close_to_uniform_or_to_mean_zero(name):
    torch.manual_seed(0)
    space, _ = ACTIONS[name]
    features = torch.randn(100, 64)

    def far_from_even(part):
        if isinstance(part, DiagonalNormal):
            return part.mean.abs().max().item(), part.log_std.abs().max().item()
        if isinstance(part, Bernoulli):
            return (part.logits.abs().max().item(),)
        logits = [each.log_p for each in getattr(part, "parts", [part])]
        return tuple((log_p + math.log(log_p.shape[-1])).abs().max().item() for log_p in logits)

    distribution = PolicyHead(64, specs.action_spec(space))(features)
    parts = distribution._leaves() if isinstance(distribution, Joint) else [distribution]
    sizes = [size for part in parts for size in far_from_even(part)]
    assert max(sizes) < 0.1
    large = PolicyHead(64, specs.action_spec(space), gain=1.0)(features)
    parts = large._leaves() if isinstance(large, Joint) else [large]
    assert max(size for part in parts for size in far_from_even(part)) > 0.5


def test_the_standard_deviation_is_learned_from_its_initial_value():
    head = PolicyHead(3, spaces.Box(-1, 1, (2,), np.float32), initial_log_std=-0.5)
    policy = head(torch.randn(4, 3))
    assert policy.log_std.tolist() == [[-0.5, -0.5]] * 4
    policy.log_std.sum().backward()
    assert head.heads[0].log_std.grad.tolist() == [4, 4]


def test_the_deviation_has_a_smooth_floor_where_one_is_wanted():
    box = spaces.Box(-1, 1, (1,), np.float32)
    for log_std in (-30.0, -2.0, 0.0):
        head = PolicyHead(3, box, initial_log_std=log_std, min_log_std=-2.0)
        policy = head(torch.randn(4, 3))
        expected = math.exp(log_std) + math.exp(-2.0)
        torch.testing.assert_close(policy.log_std.exp(), torch.full((4, 1), expected), atol=1e-5, rtol=1e-5)
    head = PolicyHead(3, box, initial_log_std=-4.0, min_log_std=-2.0)
    head(torch.randn(4, 3)).log_std.sum().backward()
    assert head.heads[0].log_std.grad.item() > 0.1  # below the floor it can rise again


def test_the_deviation_may_be_constant():
    head = PolicyHead(3, spaces.Box(-1, 1, (1,), np.float32), learn_std=False)
    assert not head.heads[0].log_std.requires_grad
    assert head(torch.randn(4, 3)).mean.requires_grad


def _matrices(module):
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            yield layer.weight.flatten(1), layer.bias


@pytest.mark.parametrize("name", ["vector", "image"])
def test_weights_are_orthogonal_and_biases_zero(name):
    torch.manual_seed(0)
    torso = Torso(specs.observation_spec(OBSERVATIONS[name]))
    matrices = list(_matrices(torso))
    assert len(matrices) == {"vector": 2, "image": 6}[name]
    for weight, bias in matrices:
        rows = weight if weight.shape[0] <= weight.shape[1] else weight.T
        torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(len(rows)), atol=1e-4, rtol=0)
        assert not bias.any()


def test_the_last_layers_are_small_for_the_policy_and_one_for_the_value():
    torch.manual_seed(0)
    network = ActorCritic(OBSERVATIONS["vector"], spaces.Discrete(3), specs.reward_spec())
    weight = network.policy_head.heads[0].linear.weight
    torch.testing.assert_close(weight @ weight.T, 1e-4 * torch.eye(3), atol=1e-8, rtol=0)
    assert network.value_head.weight.norm().item() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"layers": (5, 6)}, [nn.Linear, Tanh, nn.Linear, Tanh]),
        ({"layers": (5,), "activation": "relu", "norm": "layer"}, [nn.Linear, nn.LayerNorm, nn.ReLU]),
        ({"layers": (5,), "activation": "silu", "norm": "rms"}, [nn.Linear, RMSNorm, nn.SiLU]),
        ({"layers": (5,), "activation": nn.Hardtanh}, [nn.Linear, nn.Hardtanh]),
        ({"layers": ()}, []),
    ],
)
def test_an_mlp_has_the_layers_of_its_arguments(settings, kinds):
    mlp = MLP(3, **settings)
    assert [type(module) for module in mlp] == kinds
    size = settings["layers"][-1] if settings["layers"] else 3
    assert mlp.output_size == size
    assert mlp(torch.zeros(2, 1, 3)).shape == (2, 1, size)


def test_rms_norm_has_mean_square_1_and_one_weight_per_feature():
    norm, x = RMSNorm(4), 5 + 3 * torch.randn(6, 4)
    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(6))
    torch.testing.assert_close(norm(x), nn.RMSNorm(4, eps=1e-6)(x))
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 0.0, 1.0]))
    assert (norm(x)[:, 2] == 0).all()


def test_an_unknown_activation_is_named():
    with pytest.raises(UsageError, match=r"'tahn'.*'tanh'"):
        MLP(3, activation="tahn")
    with pytest.raises(UsageError, match="MLP.activation cannot be called .*: it is already a ReLU; give its class"):
        MLP(3, activation=nn.ReLU())


def test_only_digits_have_a_one_hot_code():
    with pytest.raises(UsageError, match=r"OneHot encodes Discrete and MultiDiscrete leaves, not Box.*use Flat"):
        Encoder(spaces.Box(-1, 1, (3,), np.float32), vector=OneHot)


@pytest.mark.parametrize("number", [10, 5000])
def test_tanh_is_tanh_with_its_gradient(number):
    x = torch.linspace(-8, 8, number).requires_grad_()
    y = Tanh()(x)
    torch.testing.assert_close(y, torch.tanh(x), atol=3e-7, rtol=0)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, 1 - torch.tanh(x) ** 2, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("num_rewards", [None, 1, 3])
@pytest.mark.parametrize("leading", [(2,), (3, 2), (1, 6)])
def test_policy_and_value_agree_with_both_at_once(leading, num_rewards, shared):
    torch.manual_seed(0)
    space = OBSERVATIONS["nested"]
    spec = specs.observation_spec(space)
    network = ActorCritic(spec, spaces.Discrete(3), specs.reward_spec(num_rewards), shared_torso=shared)
    time_step = _seen(_sample(space, leading))
    (policy, value, _), _ = network(time_step, None)
    assert value.shape == (leading if num_rewards is None else (*leading, num_rewards))
    torch.testing.assert_close(value, network.value(time_step, None))
    torch.testing.assert_close(policy.log_p, network.policy(time_step, None)[0].log_p)


@pytest.mark.parametrize("shared", [False, True])
def test_the_critic_loss_trains_only_a_shared_torso(shared):
    network = ActorCritic(OBSERVATIONS["vector"], spaces.Discrete(3), specs.reward_spec(), shared_torso=shared)
    network.value(_seen(torch.randn(5, 4)), None).sum().backward()
    assert (network.actor_torso.mlp[0].weight.grad is not None) == shared
    assert network.policy_head.heads[0].linear.weight.grad is None


def test_a_critic_without_hidden_layers_has_its_own_torso():
    """An empty Sequential is falsy."""

    class Identity(nn.Sequential):
        output_size = 4

        def initial_state(self, batch_size):
            return None

        def forward(self, time_step, state):
            return time_step.observation, state

    network = ActorCritic(
        OBSERVATIONS["vector"], spaces.Discrete(3), specs.reward_spec(), critic_torso=lambda spec: Identity()
    )
    time_step = _seen(torch.randn(5, 4))
    (_, value, _), _ = network(time_step, None)
    torch.testing.assert_close(value, network.value(time_step, None))
    network.value(time_step, None).sum().backward()
    assert network.actor_torso.mlp[0].weight.grad is None


@pytest.mark.parametrize("bound, warns", [(1.0, False), (np.inf, True)])
def test_a_normal_over_an_unbounded_action_says_that_it_is_not_scaled(caplog, bound, warns):
    PolicyHead(3, {"push": spaces.Box(np.float32(-bound), np.float32(bound), (2,))})
    assert ("action.push has no bounds" in caplog.text) == warns


@pytest.mark.parametrize(
    "shape, kind",
    [
        ((36, 36, 3), NatureCNN),
        ((35, 36, 3), SmallCNN),
        ((20, 84, 3), SmallCNN),
        ((10, 10, 4), SmallCNN),
        ((7, 7, 3), SmallCNN),
        ((3, 7, 7), SmallCNN),
        ((3, 3, 1), SmallCNN),
        ((2, 2, 1), Flat),
        ((1, 1, 1), Flat),
    ],
)
def test_images_of_every_size_have_an_encoder(shape, kind):
    encoder = Encoder(spaces.Box(0, 255, shape, np.uint8))
    assert [type(one) for one in encoder.encoders] == [kind]
    features = encoder(torch.randint(256, (5, 2, *shape), dtype=torch.uint8))
    assert features.shape == (5, 2, encoder.output_size) and torch.isfinite(features).all()
    own = Encoder(spaces.Box(0, 255, shape, np.uint8), image=Flat)
    assert isinstance(own.encoders[0], Flat)  # what is asked for is taken


def test_noisy_layers_draw_in_each_training_pass_only():
    torch.manual_seed(0)
    layer, x = NoisyLinear(4, 3), torch.randn(200, 4)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_layer_noise_has_rank_1_and_the_learned_scale():
    torch.manual_seed(0)
    layer = NoisyLinear(4, 3)
    with torch.no_grad():
        layer.weight.zero_(), layer.bias.zero_(), layer.bias_scale.zero_()
        layer.weight_scale.fill_(2.0)
        drawn = torch.stack([layer(torch.eye(4)) for _ in range(4000)])  # [.., in, out]
    assert torch.linalg.matrix_rank(drawn[0]) == 1
    torch.testing.assert_close(drawn.mean(0), torch.zeros(4, 3), atol=0.1, rtol=0)
    # E[f(e)^2] = E|e| = sqrt(2 / pi) for each of the two factors.
    torch.testing.assert_close(drawn.square().mean(0), torch.full((4, 3), 4 * 2 / torch.pi), atol=0.3, rtol=0)


def test_a_noisy_network_learns_its_noise():
    network = MLP(4, (8,), noisy=True)
    network(torch.randn(5, 4)).sum().backward()
    assert all(parameter.grad.count_nonzero() for parameter in network.parameters())


@pytest.mark.parametrize("setting", [{"bias": False}, {"unit_rows": True}])
def test_noisy_networks_need_biases_and_free_row_norms(setting):
    with pytest.raises(UsageError, match="noisy layers need bias = True and unit_rows = False"):
        MLP(4, (8,), noisy=True, **setting)


def test_invalid_encoders_and_heads_are_refused():
    box = spaces.Box(-1, 1, (3,), np.float32)
    with pytest.raises(UsageError, match=r"Encoder.leaves\['x'\] made an int, which has no forward"):
        Encoder({"x": box}, leaves={"x": lambda spec: 3})
    with pytest.raises(UsageError, match="SquashedNormalHead.min_log_std is 2; it must be below -2"):
        SquashedNormalHead(3, 1, min_log_std=2.0, max_log_std=-2.0)


def test_a_subclass_of_flat_computes_also_for_a_bare_vector():
    class Scaled(Flat):
        def forward(self, leaf):
            return super().forward(leaf) / 100

    box, observation = spaces.Box(-100, 100, (3,)), torch.tensor([[10.0, 20.0, 30.0]])
    assert Encoder(box, vector=Scaled)(observation).tolist() == [pytest.approx([0.1, 0.2, 0.3])]
    assert Encoder(box)(observation) is observation
