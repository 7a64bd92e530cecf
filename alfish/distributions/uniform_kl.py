"""The symmetric KL divergence of a policy from the uniform one, whose gradient grows as the policy gets certain."""

from typing import Any

import torch

from alfish import nest
from alfish.distributions.bernoulli import Bernoulli
from alfish.distributions.categorical import FORBIDDEN, Categorical
from alfish.distributions.joint import Joint, MultiCategorical, is_distribution, sum_of


def uniform_kl(policy: Any) -> torch.Tensor:
    """Returns the symmetric KL divergence of a policy p from the uniform distribution u, `[...]` in nats.

        0.5 (KL(p, u) + KL(u, p)) = 0.5 sum_a (p_a - u_a) log p_a

    Choices that a mask forbids have no part in u. Independent parts of an action are added.

    Args:
      policy: Categorical, Bernoulli, or MultiCategorical and Joint of these.

    Source: Petrenko et al., 2020 (Sample Factory's exploration loss 'symmetric_kl').
    """
    if isinstance(policy, Categorical):
        allowed = policy.log_p > FORBIDDEN / 2
        uniform = allowed / allowed.sum(-1, keepdim=True)
        return 0.5 * ((policy.log_p.exp() - uniform) * policy.log_p).sum(-1)
    if isinstance(policy, Bernoulli):
        is_free = policy.logits.abs() < -FORBIDDEN / 2
        return torch.where(is_free, 0.5 * (policy.logits.sigmoid() - 0.5) * policy.logits, 0.0).sum(-1)
    if isinstance(policy, (MultiCategorical, Joint)):
        return sum_of(uniform_kl(part) for part in nest.leaves(policy.parts, is_leaf=is_distribution))
    raise TypeError(f"there is no uniform distribution beside a {type(policy).__name__}")
