"""PPO with a penalty on the KL divergence from a prior policy.

    L = L_PPO + prior_kl_coef KL[pi_prior(. | s), pi(. | s)],      KL[p, q] = sum_a p(a) log(p(a) / q(a))

This is the forward KL, an expectation over the actions of the prior policy. The policy must give probability to each
action that the prior policy takes. Therefore, a policy that is fine-tuned on a new task does not forget the task of
the prior policy. The KL is computed from both distributions, not estimated from samples. The prior policy does not
train. Its distributions are computed once for each unroll.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import nest
from alfish.algorithms.imitation.expert import Expert, make_expert
from alfish.algorithms.ppo import PPO
from alfish.data import Experience, LossInfo
from alfish.errors import UsageError
from alfish.functional.distributions import Distribution
from alfish.nest import Nest
from alfish.networks import PolicyValue
from alfish.parameters import NonNegativeFloat, checked
from alfish.parameters.schedules import Schedule, as_schedule


class PriorTarget(NamedTuple):
    """The fields of `PPOTarget`, and the prior policy."""

    log_prob: torch.Tensor
    advantage: torch.Tensor
    target: torch.Tensor
    value: torch.Tensor | None
    policy: Distribution | None
    extra: dict[str, torch.Tensor]
    prior: Distribution  # [T + 1, B] distribution of the prior policy


@gin.configurable(module="alfish.algorithms")
@checked
class PriorKLPPO(PPO):
    """PPO whose loss contains KL(prior policy, policy); see the module's docstring for the equation.

    Checkpoints contain the checksum of the prior policy, not the prior policy itself. The prior policy is not loaded if
    the trained policy is loaded only to act.

    Args:
      prior: class or factory of the prior policy: `@saved_policy`, or a subclass of `Expert` with `distribution`. The
        prior policy receives the observations of this run, so this run must not have transforms of observations. A
        saved policy applies the transforms of its own run.
      prior_kl_coef: weight of KL(prior policy, policy) in nats; a number or a schedule of progress.
      ppo_arguments: settings of `PPO`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        prior: Callable[[], Expert] = gin.REQUIRED,
        prior_kl_coef: NonNegativeFloat | Schedule = 1.0,
        **ppo_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **ppo_arguments)
        self.prior = make_expert(prior, "PriorKLPPO.prior")
        self.prior.check_specs(observation_spec, action_spec)
        self._prior_kl_coef = as_schedule(prior_kl_coef)

    def preprocess_experience(self, experience: Experience) -> Experience:
        prepared = super().preprocess_experience(experience)
        prior = self.prior.distribution(experience.time_step)
        if nest.flatten(prior)[1] != nest.flatten(experience.info.policy)[1]:
            raise UsageError(
                f"the prior policy {self.prior.name} has actions of the distribution {type(prior).__name__}, but this "
                f"policy has {type(experience.info.policy).__name__}, and the KL between the two has no formula; give "
                "the policy the head of the prior policy (PolicyHead.box)"
            )
        return prepared._replace(info=PriorTarget(**prepared.info._asdict(), prior=prior))

    def calc_loss(self, experience: Experience, info: PolicyValue) -> LossInfo:
        result = super().calc_loss(experience, info)
        assert isinstance(result.loss, torch.Tensor)  # PPO has one group
        prior: Any = experience.info.prior  # has the type of `info.policy`
        kl = prior.kl(info.policy)
        loss = result.loss + self._prior_kl_coef(self.progress) * kl
        return result._replace(loss=loss, extra={**(result.extra or {}), "prior_kl": kl})
