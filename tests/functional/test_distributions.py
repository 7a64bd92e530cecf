"""Distributions against torch.distributions, and sampling against its own probabilities."""

import itertools
import math

import pytest
import torch
from torch import distributions as reference
from torch.fx.experimental.proxy_tensor import make_fx

from alfish import nest
from alfish.compiler.tracer import is_random
from alfish.functional.distributions import (
    Bernoulli,
    Categorical,
    DiagonalNormal,
    Joint,
    MultiCategorical,
    SquashedNormal,
    is_distribution,
    random_subset,
    uniform_kl,
)

LEADING = [(), (5,), (3, 4), (1, 6)]


def _logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def _pair(kind, leading=(5,), seed=0):
    """The same distribution twice: ours, and a list of torch's whose log-probabilities add up."""
    a, b, c = (_logits(*leading, size, seed=10 * seed + k) for k, size in enumerate((3, 4, 3)))
    if kind == "categorical":
        return Categorical.of(b), [reference.Categorical(logits=b)]
    if kind == "multi_categorical":
        parts = [reference.Categorical(logits=logits) for logits in (a, b)]
        return MultiCategorical((Categorical.of(a), Categorical.of(b))), parts
    if kind == "bernoulli":
        return Bernoulli(a), [reference.Independent(reference.Bernoulli(logits=a), 1)]
    return DiagonalNormal(a, c / 4), [reference.Independent(reference.Normal(a, (c / 4).exp()), 1)]


def _split(kind, action):
    if kind == "multi_categorical":
        return action.unbind(-1)
    return [action.float() if kind == "bernoulli" else action]


KINDS = ["categorical", "multi_categorical", "bernoulli", "normal"]


@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_entropy_and_kl_are_torchs(kind, leading):
    ours, torchs = _pair(kind, leading)
    other, torchs_other = _pair(kind, leading, seed=1)
    action = ours.sample()
    log_prob = sum(d.log_prob(part) for d, part in zip(torchs, _split(kind, action)))
    entropy = sum(d.entropy() for d in torchs)
    kl = sum(reference.kl_divergence(p, q) for p, q in zip(torchs, torchs_other))
    for got, expected in ((ours.log_prob(action), log_prob), (ours.entropy(), entropy), (ours.kl(other), kl)):
        assert got.shape == leading
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def symmetric_kl(logits):
    p, u = torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(torch.ones_like(logits))
    return 0.5 * (reference.kl_divergence(p, u) + reference.kl_divergence(u, p))


def test_the_symmetric_kl_from_uniform_is_that_by_hand():
    # p = (3/4, 1/4): KL(p, u) = log 2 - H(p), KL(u, p) = -log 2 - mean log p; half their sum is (log 3) / 8.
    bit = Bernoulli(torch.tensor([math.log(3)]))
    choice = Categorical.of(torch.tensor([math.log(3), 0.0]))
    for distribution in (bit, choice):
        assert uniform_kl(distribution).item() == pytest.approx(math.log(3) / 8)
    joint = Joint({"a": bit, "b": MultiCategorical((choice, choice))})
    assert uniform_kl(joint).item() == pytest.approx(3 * math.log(3) / 8)
    assert uniform_kl(Categorical.of(torch.zeros(4))) == uniform_kl(Bernoulli(torch.zeros(2))) == 0


@pytest.mark.parametrize("leading", LEADING)
def test_the_symmetric_kl_from_uniform_is_torchs(leading):
    logits = _logits(*leading, 4)
    torch.testing.assert_close(uniform_kl(Categorical.of(logits)), symmetric_kl(logits))


def test_the_uniform_distribution_is_over_allowed_choices():
    logits = _logits(6, 5).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1, 0]] * 4 + [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    found = uniform_kl(Categorical.of(logits, mask))
    expected = symmetric_kl(logits[:4][:, [0, 1, 3]])
    torch.testing.assert_close(found[:4], expected)
    assert found[4:].tolist() == pytest.approx([0, 0], abs=1e-6)
    torch.testing.assert_close(
        *(torch.autograd.grad(kl.sum(), logits, retain_graph=True)[0] for kl in (found, expected))
    )
    bits, both = _logits(3, 2).requires_grad_(), torch.ones(3, 2, dtype=torch.bool)
    kl = uniform_kl(Bernoulli.of(bits, torch.stack([both, torch.tensor([[True, False]] * 3)], -1)))
    torch.testing.assert_close(kl, uniform_kl(Bernoulli(bits[:, :1])))
    (gradient,) = torch.autograd.grad(kl.sum(), bits)
    assert gradient[:, 0].all() and not gradient[:, 1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_actions_have_the_shape_and_dtype_of_the_stream(kind):
    dtype, shape = {
        "categorical": (torch.int64, (3, 4)),
        "multi_categorical": (torch.int64, (3, 4, 2)),
        "bernoulli": (torch.int8, (3, 4, 3)),
        "normal": (torch.float32, (3, 4, 3)),
    }[kind]
    distribution, _ = _pair(kind, (3, 4))
    for action in (distribution.sample(), distribution.mode()):
        assert action.dtype == dtype
        assert action.shape == shape


@pytest.mark.parametrize("kind", KINDS)
def test_no_action_is_likelier_than_the_mode(kind):
    distribution, _ = _pair(kind, (50,))
    best = distribution.log_prob(distribution.mode())
    for _ in range(20):
        assert (distribution.log_prob(distribution.sample()) <= best + 1e-6).all()


@pytest.mark.parametrize("kind", ["categorical", "multi_categorical", "bernoulli"])
def test_frequencies_of_samples_equal_their_probabilities(kind):
    torch.manual_seed(0)
    distribution, _ = _pair(kind, ())
    draws = 40_000
    many = nest.map(lambda leaf: leaf.expand(draws, *leaf.shape), distribution).sample().reshape(draws, -1)
    choices = {"categorical": [range(4)], "multi_categorical": [range(3), range(4)], "bernoulli": [range(2)] * 3}[kind]
    total = 0.0
    for action in itertools.product(*choices):
        action = torch.tensor(action)
        probability = distribution.log_prob(action[0] if kind == "categorical" else action).exp().item()
        frequency = (many == action).all(-1).double().mean().item()
        assert abs(frequency - probability) < 5 * (probability * (1 - probability) / draws) ** 0.5 + 1e-9
        total += probability
    assert total == pytest.approx(1, abs=1e-5)


def test_normal_samples_have_its_mean_and_deviation():
    torch.manual_seed(0)
    mean, log_std = torch.tensor([1.0, -3.0]), torch.tensor([0.5, -1.0])
    samples = DiagonalNormal(mean.expand(50_000, 2), log_std.expand(50_000, 2)).sample()
    assert ((samples.mean(0) - mean).abs() < 5 * log_std.exp() / 50_000**0.5).all()
    torch.testing.assert_close(samples.std(0), log_std.exp(), rtol=0.02, atol=0)
    assert abs(torch.corrcoef(samples.T)[0, 1].item()) < 0.02


def test_rows_are_sampled_independently():
    torch.manual_seed(0)
    samples = Categorical.of(torch.zeros(1000, 2)).sample().double()
    assert 400 < samples.sum() < 600
    assert DiagonalNormal(torch.zeros(100, 1), torch.zeros(100, 1)).sample().unique().numel() == 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantity", ["log_prob", "entropy", "kl"])
def test_gradients_are_torchs(kind, quantity):
    ours, _ = _pair(kind)
    action = ours.sample()
    leaves = [leaf.clone().requires_grad_() for leaf in (_logits(5, 3, seed=7), _logits(5, 4, seed=8))]
    spread = (0.3 * _logits(5, 3, seed=9)).requires_grad_()
    a, b = leaves
    mine, torchs = {
        "categorical": lambda: (Categorical.of(b), [reference.Categorical(logits=b)]),
        "multi_categorical": lambda: (
            MultiCategorical((Categorical.of(a), Categorical.of(b))),
            [reference.Categorical(logits=a), reference.Categorical(logits=b)],
        ),
        "bernoulli": lambda: (Bernoulli(a), [reference.Independent(reference.Bernoulli(logits=a), 1)]),
        "normal": lambda: (
            DiagonalNormal(a, spread), [reference.Independent(reference.Normal(a, spread.exp()), 1)],
        ),
    }[kind]()  # fmt: skip
    other, torchs_other = _pair(kind, seed=3)
    if quantity == "log_prob":
        pair = mine.log_prob(action), sum(d.log_prob(x) for d, x in zip(torchs, _split(kind, action)))
    elif quantity == "entropy":
        pair = mine.entropy(), sum(d.entropy() for d in torchs)
    else:
        pair = mine.kl(other), sum(reference.kl_divergence(p, q) for p, q in zip(torchs, torchs_other))
    got, expected = (
        torch.autograd.grad(value.sum(), (a, b, spread), allow_unused=True, materialize_grads=True) for value in pair
    )
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert any(gradient.abs().max() > 1e-3 for gradient in got)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_is_zero_to_itself_and_positive_to_another(kind):
    ours, _ = _pair(kind, (20,))
    other, _ = _pair(kind, (20,), seed=1)
    torch.testing.assert_close(ours.kl(ours), torch.zeros(20), atol=1e-5, rtol=0)
    assert (ours.kl(other) > 0).all()


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_certain_policies_stay_finite(size):
    for distribution, action in (
        (Categorical.of(torch.tensor([size, -size])), torch.tensor(1)),
        (Bernoulli(torch.tensor([size, -size])), torch.tensor([0, 1], dtype=torch.int8)),
    ):
        for value in (distribution.log_prob(action), distribution.entropy(), distribution.kl(distribution)):
            assert torch.isfinite(value)
        assert distribution.entropy().item() == pytest.approx(0, abs=1e-6)


def test_squashed_normal_densities_of_actions_and_samples_agree():
    torch.manual_seed(0)
    policy = SquashedNormal(0.5 * torch.randn(1000, 3), -0.5 + 0.3 * torch.randn(1000, 3))
    action, log_prob = policy.sample_with_log_prob()
    assert action.abs().max() < 0.9999
    torch.testing.assert_close(policy.log_prob(action), log_prob, atol=2e-3, rtol=1e-4)
    mean = torch.tensor([[0.0], [1.5]])
    normal = reference.Normal(mean.double(), 0.5)
    squashed = reference.TransformedDistribution(normal, reference.TanhTransform())
    for number in (-0.99999, -0.7, 0.0, 0.3, 0.99999):
        action = torch.full((2, 1), number)
        found = SquashedNormal(mean, torch.full_like(mean, math.log(0.5))).log_prob(action)
        torch.testing.assert_close(found.double(), squashed.log_prob(action.double())[:, 0], atol=0.05, rtol=1e-3)


def test_the_divergence_of_squashed_normals_is_the_mean_of_their_log_ratio():
    torch.manual_seed(0)
    policy, other = (
        SquashedNormal(torch.tensor([0.3, -0.5]), torch.tensor([-0.5, 0.1])),
        SquashedNormal(torch.tensor([0.1, -0.2]), torch.tensor([-0.2, 0.0])),
    )
    many = SquashedNormal(*(leaf.expand(100_000, 2) for leaf in policy))
    action, log_prob = many.sample_with_log_prob()
    assert policy.kl(other).item() == pytest.approx((log_prob - other.log_prob(action)).mean().item(), abs=0.01)
    assert policy.kl(policy).item() == 0 and policy.kl(other) > 0.05


def test_squashed_normal_density_and_ratio_are_finite_at_bounds():
    action = torch.tensor([[1.0, -1.0], [1.0, 0.2]])
    policy, other = (SquashedNormal(torch.full((2, 2), mean), torch.full((2, 2), -1.0)) for mean in (0.3, 0.4))
    inside = action.clamp(-(1 - 1e-6), 1 - 1e-6)
    assert torch.isfinite(policy.log_prob(action)).all()
    assert torch.equal(policy.log_prob(action), policy.log_prob(inside))
    # The slope of tanh is the same in both.
    before = torch.atanh(inside.double()).float()
    normals = [DiagonalNormal(each.mean, each.log_std) for each in (policy, other)]
    expected = normals[0].log_prob(before) - normals[1].log_prob(before)
    torch.testing.assert_close(policy.log_prob(action) - other.log_prob(action), expected, atol=0.02, rtol=0.01)


def _joint(leading=(5,)):
    """For the action nest {"b": {"y": discrete, "x": (bits, box)}, "a": multi-discrete}."""
    parts = {kind: _pair(kind, leading)[0] for kind in KINDS}
    inner = {"y": parts["categorical"], "x": (parts["bernoulli"], parts["normal"])}
    return Joint({"b": inner, "a": parts["multi_categorical"]}), parts


def test_joint_distributions_sample_nests_and_sum_log_probs():
    joint, parts = _joint((3, 4))
    action = joint.sample()
    assert action["b"]["y"].shape == (3, 4)
    assert action["b"]["x"][0].dtype == torch.int8
    each = {
        "categorical": action["b"]["y"], "bernoulli": action["b"]["x"][0], "normal": action["b"]["x"][1],
        "multi_categorical": action["a"],
    }  # fmt: skip
    expected = sum(parts[kind].log_prob(each[kind]) for kind in KINDS)
    torch.testing.assert_close(joint.log_prob(action), expected)
    torch.testing.assert_close(joint.entropy(), sum(part.entropy() for part in parts.values()))
    assert torch.equal(joint.mode()["b"]["y"], parts["categorical"].mode())


def test_a_joints_kl_is_the_sum_of_its_parts():
    joint, parts = _joint()
    other = nest.map(lambda leaf: leaf * 0.5, joint)
    expected = sum(part.kl(nest.map(lambda leaf: leaf * 0.5, part)) for part in parts.values())
    torch.testing.assert_close(joint.kl(other), expected)


def test_a_joint_travels_as_a_nest_of_tensors():
    joint, _ = _joint((6, 2))
    rows = nest.map(lambda leaf: leaf[:4], joint)
    assert isinstance(rows, Joint)
    assert isinstance(rows.parts["b"]["x"][1], DiagonalNormal)
    assert rows.log_prob(rows.sample()).shape == (4, 2)
    assert not is_distribution(joint)
    assert all(is_distribution(part) for part in (*_joint()[1].values(),))


def _mask(*shape, seed=3):
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[..., 1] = True
    return mask


def test_a_masked_categorical_and_its_gradients_equal_those_of_the_allowed_logits():
    logits, others, mask = _logits(40, 6).double(), _logits(40, 6, seed=1).double(), _mask(40, 6)
    for row in range(40):
        whole, other = logits[row].clone().requires_grad_(), others[row]
        alone = logits[row][mask[row]].clone().requires_grad_()
        ours, less = Categorical.of(whole, mask[row]), Categorical.of(alone)
        their, fewer = Categorical.of(other, mask[row]), Categorical.of(other[mask[row]])
        for k, i in enumerate(mask[row].nonzero()[:, 0]):
            values = ours.log_prob(i), ours.entropy(), ours.kl(their)
            expected = less.log_prob(torch.tensor(k)), less.entropy(), less.kl(fewer)
            for value, same in zip(values, expected):
                assert torch.allclose(value, same, atol=1e-12)
                (gradient,) = torch.autograd.grad(value, whole, retain_graph=True)
                (wanted,) = torch.autograd.grad(same, alone, retain_graph=True)
                assert torch.allclose(gradient[mask[row]], wanted, atol=1e-12)
                assert (gradient[~mask[row]] == 0).all()


def test_forbidden_actions_are_never_drawn_and_no_value_is_nan():
    torch.manual_seed(0)
    logits, mask = 30 * _logits(5000, 8), _mask(5000, 8)
    mask[0] = False
    masked = Categorical.of(logits.requires_grad_(), mask)
    for action in (masked.sample(), masked.mode()):
        assert mask.gather(-1, action[:, None])[1:].all()
    assert (masked.log_p.exp()[~mask][8:] == 0).all()
    assert torch.allclose(masked.log_p[0].exp(), torch.full((8,), 1 / 8))  # none is allowed: all are
    loss = masked.entropy().sum() + masked.kl(Categorical.of(_logits(5000, 8), mask)).sum()
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()


def test_masked_bits_have_their_only_value_and_no_gradient():
    torch.manual_seed(0)
    logits = _logits(4000, 4).requires_grad_()
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [0, 0]]).bool().expand(4000, 4, 2)
    masked, free = Bernoulli.of(logits, mask), Bernoulli(logits[:, [0, 3]])
    sample = masked.sample()
    for action in (sample, masked.mode()):
        assert (action[:, 1] == 0).all() and (action[:, 2] == 1).all()
        assert action[:, 0].unique().tolist() == action[:, 3].unique().tolist() == [0, 1]  # 3: none is allowed, so both
    other = Bernoulli.of(_logits(4000, 4, seed=1), mask), Bernoulli(_logits(4000, 4, seed=1)[:, [0, 3]])
    pairs = [
        (masked.log_prob(sample), free.log_prob(sample[:, [0, 3]])),
        (masked.entropy(), free.entropy()),
        (masked.kl(other[0]), free.kl(other[1])),
    ]
    for ours, alone in pairs:
        assert torch.allclose(ours, alone, atol=1e-5)
        gradient, expected = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (ours, alone))
        assert torch.allclose(gradient, expected, atol=1e-6) and (gradient[:, [1, 2]] == 0).all()


def test_a_random_subset_has_the_same_entries_of_each_tensor():
    each = [torch.arange(5.0), torch.arange(10.0).view(5, 2)]
    assert random_subset(each, None) is each
    found = set()
    for seed in range(20):
        torch.manual_seed(seed)
        small, large = random_subset(each, 2)
        assert torch.equal(large, each[1][small.long()]) and len(small) == len(small.unique()) == 2
        found |= set(small.tolist())
    assert len(found) == 5


def test_random_subsets_can_be_recorded_by_cuda_graphs():
    def drawing(device):
        graph = make_fx(lambda: random_subset([torch.empty(10, 3, device=device)], 2))().graph
        return [node.target.overloadpacket.__name__ for node in graph.nodes if is_random(node)]

    assert drawing("cpu") == ["randperm"] and drawing("meta") == ["rand"]
    assert random_subset([torch.empty(10, 3, device="meta")], 2)[0].shape == (2, 3)
