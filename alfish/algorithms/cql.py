"""CQL and Cal-QL, for recorded data: SAC with a penalty that lowers the values of actions that are not in the data.

    y = r + gamma d min_k Q'_k(s', a'),   a' ~ pi(. | s'),   without the entropy bonus of SAC's target
    critics:  (Q_k(s, a) - y)^2 / 2 + conservatism (log sum_j exp(Q_k(s, a_j)) - Q_k(s, a))

For Box actions, a_j are samples: uniform ones, samples of pi(. | s) and samples of pi(. | s'), each weighted by
1 / (number of samples x density), so that the sum estimates the integral of exp(Q_k) over all actions. For a Discrete
action, the sum is exact. Actor and temperature are trained as in SAC.

CQL, conservative Q-learning: Kumar et al., 2020, https://arxiv.org/abs/2006.04779; this is CQL(H) of equation 4.
Cal-QL: Nakamoto et al., 2023, https://arxiv.org/abs/2303.05479.

Differences from the papers: `sac` has those of the actor and the temperature; the weight `conservatism` is fixed, and
has no Lagrange form. The authors' code omits the 1 / 2, so its weight of the penalty is twice `conservatism`.
"""

import math
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.q_learning import allowed_q
from alfish.algorithms.rl_algorithm import ReplayNeeds
from alfish.algorithms.sac import SAC, SACTrain
from alfish.data import AlgStep, Experience, LossInfo
from alfish.errors import UsageError
from alfish.functional.distributions import SquashedNormal
from alfish.functional.targets import NextValues
from alfish.nest import Nest
from alfish.networks import Features, first_and_bootstrap_rows
from alfish.networks.hybrid import Choice, HybridPolicy
from alfish.parameters import NonNegativeFloat, PositiveInt, checked


class CQLTrain(NamedTuple):
    """Outputs for the row that trains."""

    sac: SACTrain
    gap: torch.Tensor  # [E, 1, N] soft maximum of Q over all actions, minus Q of the recorded action


@gin.configurable(module="alfish.algorithms")
@checked
class CQL(SAC):
    """Conservative Q-learning; see the module's docstring for the paper and the differences from it.

    The action is a nest of Box leaves, or one Discrete leaf; the reward is a scalar.

    Args:
      conservatism: weight of the penalty of the critics; 0 means none.
      num_samples: number of actions of each of the three kinds of samples, for Box actions.
      sac_arguments: settings of `SAC`; `values` can only be None or `@LowerBounded`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        conservatism: NonNegativeFloat = 5.0,
        num_samples: PositiveInt = 10,
        **sac_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **sac_arguments)
        self._conservatism, self._num_samples = conservatism, num_samples
        if self.values.num_values is not None:
            raise UsageError(
                f"{type(self).__name__}.values is a distribution of the return, but the penalty of "
                f"{type(self).__name__} requires expected returns; leave `values` out"
            )

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        leaves = nest.leaves(action_spec)
        if len(leaves) != 1 or not isinstance(leaves[0], spaces.Discrete):
            specs.check_box_action(cls.__name__, action_spec)
        specs.check_scalar_reward(cls.__name__, reward_spec)

    def next_values(
        self, experience: Experience, features: Features, policy: HybridPolicy, drawn: Choice
    ) -> NextValues:
        q = self.target_critic(features.next_critic, drawn.box)
        return NextValues(self.soft_value(self.target_q(q), drawn, {}))

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        outputs = super().train_step(experience, state).info
        experience = first_and_bootstrap_rows(experience, self._lambda)
        soft_maximum = self._over_samples if self.action_space.box_size else self._over_choices
        return AlgStep(info=CQLTrain(outputs, soft_maximum(experience) - outputs.q))

    def calc_loss(self, experience: Experience, info: CQLTrain) -> LossInfo:  # type: ignore[override]
        found = super().calc_loss(experience, info.sac)
        assert isinstance(found.loss, dict) and found.extra is not None
        critic_loss = found.loss["critic"] + self._conservatism * info.gap.sum(0)
        extra = found.extra | {"conservative_gap": info.gap.mean(0)}
        return found._replace(loss=found.loss | {"critic": critic_loss}, extra=extra)

    def sampled_q(self, q: torch.Tensor, experience: Experience) -> torch.Tensor:
        """Returns the values of the policy's samples for the penalty, from the critics' values `[E, 2 S, 1, N]`."""
        return q

    def _over_choices(self, experience: Experience) -> torch.Tensor:
        """Returns the soft maximum `[E, 1, N]` over the allowed choices at row 0."""
        now = nest.at(experience.time_step, slice(0, 1))
        return allowed_q(self.critic(self.critic.features(now, None)[0]), self.discrete_mask(now)).logsumexp(-1)

    def _over_samples(self, experience: Experience) -> torch.Tensor:
        """Returns the estimate `[E, 1, N]` of the soft maximum over Box actions at row 0."""
        features = self.critic.features(nest.at(experience.time_step, slice(0, 1)), None)[0]
        with torch.no_grad():
            observation = nest.at(experience.time_step.observation, slice(0, 2))
            policy = self.policy(self.actor_encoder(observation), None).box
            assert policy is not None
            shape = (self._num_samples, *policy.mean.shape)  # [S, 2, N, A]
            drawn, log_density = SquashedNormal(*(each.expand(shape) for each in policy)).sample_with_log_prob()
            drawn, log_density = drawn.flatten(0, 1).unsqueeze(1), log_density.flatten(0, 1).unsqueeze(1)
            uniform = 2 * torch.rand_like(drawn[: self._num_samples]) - 1
        of_uniform, of_drawn = (
            self.critic(features.expand(len(action), *features.shape), action) for action in (uniform, drawn)
        )
        log_volume = uniform.shape[-1] * math.log(2)  # of all actions: -log of the uniform density
        weighted = [of_uniform + log_volume, self.sampled_q(of_drawn, experience) - log_density]
        return torch.cat(weighted, 1).logsumexp(1) - math.log(3 * self._num_samples)


@gin.configurable(module="alfish.algorithms")
@checked
class CalQL(CQL):
    """CQL calibrated by the observed returns: values of the policy's actions below the return are not lowered.

    In the penalty, Q(s, a_j) of the policy's samples becomes max(Q(s, a_j), R(s)), with the observed return R(s) of the
    rest of the episode (`Experience.return_to_go`). Where it is unknown, as in episodes that have not ended, nothing
    changes. The return of a truncated episode lacks later rewards.

    The critics then do not fall below the values of the recorded policy, so learning can continue with acting.

    Args:
      cql_arguments: settings of `CQL`; the action has Box leaves only.
    """

    def __init__(self, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box, **cql_arguments: Any):
        super().__init__(observation_spec, action_spec, reward_spec, **cql_arguments)
        self.replay_needs = ReplayNeeds(return_gamma=self.values.gamma)

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        specs.check_box_action(cls.__name__, action_spec)
        specs.check_scalar_reward(cls.__name__, reward_spec)

    def sampled_q(self, q: torch.Tensor, experience: Experience) -> torch.Tensor:
        if experience.return_to_go is None:
            raise UsageError(
                "CalQL needs the returns of whole episodes (Experience.return_to_go), but these batches have none; "
                "train from replay or recorded data"
            )
        observed = experience.return_to_go[:1]
        return torch.where(observed > q, observed, q)  # a comparison with nan is False
