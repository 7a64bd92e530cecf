"""Beta distributions against torch.distributions, and samples against their moments."""

import math

import torch
from torch import distributions as reference

from alfish.functional.beta import Beta


def _betas(seed=0):
    """Two beta distributions [5, 3] of this package, and torch's of (action + 1) / 2."""
    parameters = (1.01 + 4 * torch.rand(4, 5, 3, generator=torch.Generator().manual_seed(seed))).requires_grad_()
    ours = Beta(*parameters[:2]), Beta(*parameters[2:])
    return parameters, ours, [reference.Beta(*each) for each in ours]


def test_beta_log_prob_entropy_kl_and_gradients_equal_torch():
    parameters, (policy, other), (torchs, torchs_other) = _betas()
    action = policy.sample().detach()
    expected = {
        "log_prob": (torchs.log_prob((1 + action) / 2) - math.log(2)).sum(-1),
        "entropy": (torchs.entropy() + math.log(2)).sum(-1),
        "kl": reference.kl_divergence(torchs, torchs_other).sum(-1),
    }
    found = {"log_prob": policy.log_prob(action), "entropy": policy.entropy(), "kl": policy.kl(other)}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
        gradients = [torch.autograd.grad(one.sum(), parameters, retain_graph=True)[0] for one in (found[name], value)]
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_beta_samples_are_in_bounds_with_its_mean_and_variance():
    torch.manual_seed(0)
    policy = Beta(torch.tensor([1.5, 6.0]), torch.tensor([3.0, 2.0]))
    drawn = Beta(*(each.expand(200_000, 2) for each in policy)).sample()
    assert drawn.abs().max() <= 1
    torchs = reference.Beta(*policy)
    torch.testing.assert_close(drawn.mean(0), 2 * torchs.mean - 1, atol=5e-3, rtol=0)
    torch.testing.assert_close(drawn.var(0), 4 * torchs.variance, atol=5e-3, rtol=0)


def test_beta_mode_is_most_probable_and_density_is_finite_at_bounds():
    policy = Beta(torch.tensor([1.5]), torch.tensor([3.0]))
    grid = torch.linspace(-1, 1, 2001)[:, None]
    density = Beta(*(each.expand(2001, 1) for each in policy)).log_prob(grid)
    assert density.isfinite().all()
    torch.testing.assert_close(policy.mode(), grid[density.argmax()], atol=1e-3, rtol=0)
    torch.testing.assert_close(density.exp().sum() * 2 / 2000, torch.tensor(1.0), atol=1e-3, rtol=0)
