"""Relative entropy pathwise policy optimization: on-policy, with an action-value critic, for Box actions.

Voelcker et al., 2025, https://arxiv.org/abs/2507.11019. The critic learns lambda-returns of the unroll, including
entropies. The policy follows the critic's gradient, as in SAC, but its KL from the policy that acted is limited. There
is no replay and no target network.

Differences from the authors' code: the KL divergence is exact, because tanh cancels out, while the code averages 16
samples; the unroll stores the distribution of the policy that acted, so the network is not copied; returns have no
entropy after a termination; the losses of actor and critic are computed before either is updated; linear layers have
orthogonal initial weights.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm, UnrollUse
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.functional.distributions import SquashedNormal
from alfish.functional.return_distributions import Bins
from alfish.functional.targets import NextValues, td_target
from alfish.nest import Nest
from alfish.networks import MLP, Encoder, HybridSpace, PredictiveCritic, SquashedNormalHead
from alfish.networks.hybrid import HybridAction
from alfish.parameters import FiniteFloat, NonNegativeFloat, PositiveFloat, UnitInterval, checked
from alfish.parameters.parts import build, build_network

HL_GAUSS = functools.partial(Bins, smoothing=0.75)


class REPPOTarget(NamedTuple):
    """Inputs of the losses, computed once for each unroll, `[T, B]`."""

    policy: SquashedNormal  # policy that acted
    target: torch.Tensor  # target of the value
    next_features: torch.Tensor | None  # [T, B, F] features of the next row; None if they are not predicted


class REPPOTrain(NamedTuple):
    """Outputs at the rows `[T, N]` that the losses use."""

    q: torch.Tensor  # [T, N, K] value of the taken action
    prediction: torch.Tensor | None  # [T, N, F] predicted features of the next row
    policy: SquashedNormal
    policy_q: torch.Tensor  # value of an action of the policy
    log_prob: torch.Tensor  # log-probability of that action


@gin.configurable(module="alfish.algorithms")
@checked
class REPPO(RLAlgorithm):
    """Relative entropy pathwise policy optimization; see the module's docstring for the paper and differences from it.

    Args:
      actor_encoder: class or factory of the actor's encoder; called with the observation spec.
      actor_mlp: class or factory of the actor's MLP; called with the encoder's output size.
      critic: class or factory of the critic; called with (observation_spec, action_size, initial, predicts); see
        `PredictiveCritic`.
      values: class or factory of the value representation, a distribution of the return over bins; called with gamma.
      gamma: discount per environment step.
      lambda_: weight of longer returns, in [0, 1]; 1 bootstraps only at the end of the unroll, and 0 gives the one-step
        return.
      initial_alpha: temperature (weight of the entropy) at the start of training.
      entropy_fraction: negative of the target entropy for each Box entry, in nats.
      initial_beta: weight of the KL divergence at the start of training.
      target_kl: limit of the KL divergence in nats. On rows whose KL is above this limit, the policy's loss is only the
        weighted KL. The weight is adjusted to keep the KL near the limit.
      prediction_coef: weight of the loss of predicted features; 0 means that the critic has no predictor.
    """

    on_policy = True
    unroll_use = UnrollUse(single_epoch=False)

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        actor_encoder: Callable[[Nest], Any] = Encoder,
        actor_mlp: Callable[[int], Any] = MLP,
        critic: Callable[..., Any] = PredictiveCritic,
        values: Callable[[float], Any] = HL_GAUSS,
        gamma: UnitInterval = 0.99,
        lambda_: UnitInterval = 0.95,
        initial_alpha: PositiveFloat = 0.01,
        entropy_fraction: FiniteFloat = 0.5,
        initial_beta: PositiveFloat = 0.01,
        target_kl: PositiveFloat = 0.1,
        prediction_coef: NonNegativeFloat = 1.0,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        name = type(self).__name__
        self.action_space = HybridSpace(action_spec)
        size = self.action_space.box_size
        self.values = build(values, Bins, f"{name}.values", gamma)
        self.actor_encoder: Any = build_network(actor_encoder, f"{name}.actor_encoder", observation_spec)
        self.actor_mlp: Any = build_network(actor_mlp, f"{name}.actor_mlp", self.actor_encoder.output_size)
        self.policy_head = SquashedNormalHead(self.actor_mlp.output_size, size)
        arguments = observation_spec, size, self.values.certain(torch.zeros(())), prediction_coef > 0
        has = ("features", "value", "prediction")
        self.critic: Any = build_network(critic, f"{name}.critic", *arguments, has=has, takes=2)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial_alpha)))
        self.log_beta = nn.Parameter(torch.tensor(math.log(initial_beta)))
        self._lambda, self._target_kl = lambda_, target_kl
        self._target_entropy, self._prediction_coef = -entropy_fraction * size, prediction_coef

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        specs.check_box_action(cls.__name__, action_spec)
        specs.check_scalar_reward(cls.__name__, reward_spec)

    def parameter_groups(self) -> dict:
        actor = nn.ModuleList([self.actor_encoder, self.actor_mlp, self.policy_head])
        return {"critic": self.critic.parameters(), "actor": [*actor.parameters(), self.log_alpha, self.log_beta]}

    def policy(self, observation: Nest) -> SquashedNormal:
        return self.policy_head(self.actor_mlp(self.actor_encoder(observation)))

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        return AlgStep(self._nested(self.policy(time_step.observation).sample()), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        return AlgStep(self._nested(self.policy(time_step.observation).mode()), state)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[B]` of rows `[B]`: the values of the mode of the policy."""
        action = self.policy(time_step.observation).mode()
        return self.values.scalarized(self.critic(time_step.observation, action))

    def preprocess_experience(self, experience: Experience) -> Experience:
        step = experience.time_step  # [T+1, B]
        policy = self.policy(step.observation)
        old, later = nest.at(policy, slice(None, -1)), nest.at(policy, slice(1, None))
        action, log_prob = later.sample_with_log_prob()  # [T, B] of rows 1 to T
        features = self.critic.features(nest.at(step.observation, slice(1, None)), action)
        value = self.values.scalarized(self.critic.value(features))
        reward, discount = self.values.reward_and_discount(step)
        following = NextValues(value, bonus=-discount[1:] * self.log_alpha.exp() * log_prob)
        target = td_target(experience, reward, discount, following, self._lambda)
        return experience._replace(info=REPPOTarget(old, target, features if self._prediction_coef else None))

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        observation = experience.time_step.observation
        features = self.critic.features(observation, self.action_space.split(experience.action).box)
        policy = self.policy(observation)
        action, log_prob = policy.sample_with_log_prob()
        info = REPPOTrain(
            q=self.critic.value(features),
            prediction=self.critic.prediction(features) if self._prediction_coef else None,
            policy=policy,
            policy_q=self.values.scalarized(self.critic(observation, action)),
            log_prob=log_prob,
        )
        return AlgStep(info=info)

    def calc_loss(self, experience: Experience, info: REPPOTrain) -> LossInfo:
        unroll = experience.info
        target = self.values.certain(unroll.target)
        critic_loss, _ = self.values.loss(info.q, target)
        extra = self.values.shown(info.q, target) | {"returns_clipped": self.values.clipped(unroll.target)}
        if info.prediction is not None:
            extra["prediction_loss"] = (info.prediction - unroll.next_features).square().mean(-1)
            critic_loss = critic_loss + self._prediction_coef * extra["prediction_loss"]
        alpha, beta = self.log_alpha.exp(), self.log_beta.exp()
        kl = unroll.policy.kl(info.policy)  # KL(policy that acted, current policy)
        is_near = kl < self._target_kl
        policy_loss = torch.where(is_near, alpha.detach() * info.log_prob - info.policy_q, beta.detach() * kl)
        excess_entropy = (-info.log_prob - self._target_entropy).detach()
        excess_kl = (kl - self._target_kl).detach()
        loss = {"critic": critic_loss, "actor": policy_loss + alpha * excess_entropy - beta * excess_kl}
        extra |= {"kl": kl, "kl_fraction": 1 - is_near.float(), "entropy": -info.log_prob}
        return LossInfo(loss, extra=extra | {"policy_loss": policy_loss, "alpha": alpha, "beta": beta})

    def _nested(self, box: torch.Tensor) -> Nest:
        return self.action_space.join(HybridAction(box, None))
