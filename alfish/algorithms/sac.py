"""Soft actor-critic with learned temperatures: off-policy, for Box and Discrete actions.

Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905. Discrete: Christodoulou, 2019, https://arxiv.org/abs/1910.07207.
Retrace: Munos et al., 2016, https://arxiv.org/abs/1606.02647. Lower bounds: He et al., 2017,
https://arxiv.org/abs/1611.01606.

The action is a nest of Box leaves and at most one Discrete leaf (`networks.hybrid`). Box entries are inputs of
the critics, which have one output for each Discrete choice. Each of the two kinds has its own temperature. REDQ (Chen
et al., 2021), DroQ and RLPD are settings: ensemble size, target subset, layer norm, dropout. Row 0 of a window trains.

Differences from the papers: a truncated episode bootstraps from its true final observation; `Temperatures.linear_in` is
'log_alpha'; n-step returns without Retrace leave out the entropies of the rows in between.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.algorithms.delayed_actor import DelayedActor
from alfish.algorithms.hybrid_acting import DrawnAction
from alfish.algorithms.hybrid_actor import HybridActor
from alfish.algorithms.joint_pass import critic_passes
from alfish.algorithms.rl_algorithm import ReplayNeeds
from alfish.corrections import behaviour_trace
from alfish.data import AlgStep, Experience, LossInfo
from alfish.nest import Nest
from alfish.networks import MLP, CriticEnsemble, Encoder, transitions
from alfish.networks.bodies.batch_norm import Moments
from alfish.networks.hybrid import Temperatures
from alfish.networks.no_target import target_of
from alfish.parameters import FiniteFloat, PositiveFloat, PositiveInt, Rate, UnitInterval, checked
from alfish.targets import NextValues
from alfish.values import Discount, RewardWeights, values_of


class SACTrain(NamedTuple):
    """Outputs of the rows that train."""

    q: torch.Tensor  # [E, T', N] or [E, T', N, K] of the taken action
    following: NextValues  # soft values of rows 1 to L-1 or of `transitions`, by the target critics
    value: torch.Tensor | None  # [T', N] soft value of the present policy; None: the actor does not train
    entropies: dict[str, torch.Tensor]  # [T', N] of the present policy; empty: the actor does not train
    moments: Moments  # of batch norms


@gin.configurable(module="alfish.algorithms")
@checked
class SAC(DelayedActor, HybridActor):
    """Soft actor-critic; the module's docstring has the papers and the differences from them.

    Args:
      actor_encoder: takes the observation spec.
      actor_mlp: takes the encoder's output size.
      critic: takes (observation_spec, action_size, num_outputs); has an `ensemble_size`.
      gamma: discount per environment step; a list: one for each entry of a vector reward.
      lambda_: of the return within a window; 1 bootstraps at the last row only, 0 is the one-step return; None: 1.
      target_rate, target_period: of the target critics' updates. A rate of None: the critics are their own targets.
      target_subset: number of critics, drawn at random for each update, whose minimum is the target; None: all.
      actor_uses_mean: the actor maximizes the critics' mean (REDQ) instead of their minimum.
      initial_alpha: temperature at the start.
      learn_alpha: whether temperatures are learned.
      box_target_entropy: in nats; None: minus the number of Box entries.
      discrete_entropy_fraction: target entropy of the Discrete leaf, in [0, 1] of the maximum, log n; with a mask, n is
        the number of choices that it allows at a row.
      retrace: returns of several steps are corrected by min(1, pi / mu). They end at actions that the policy did not
        draw, and where log_prob is nan.
      lower_bound: targets are at least the return to the end of the episode. Correct only in deterministic environments
        with entropies that are not negative and, for truncated episodes, with rewards that are not negative.
      reward_weights: of the entries of a vector reward; the buffer `values.weights` begins with them. None: 1.
      values: a distribution of the return as the value (`@Bins`, `@Quantiles`), for a scalar reward and Box actions;
        takes gamma. None: the expected return.
      actor_period: updates of the critics for each update of the actor and the temperatures.
      actor_statistics_always: batch norms of the actor update their statistics also when it does not train (XQC).
      joint_pass: critics take both rows of a transition in one pass, see `JointPass`; 'with_actor': the actor too.
      noise: of exploration, takes the number of Box entries (`@HeldNoise`); None: new noise at each step.
    """

    on_policy = False
    weighted_losses = ("critic",)
    updates_batch_norms: ClassVar[tuple[str, ...]] = ("actor_mlp", "critic.body", "target_critic")
    default_lambda: ClassVar[float] = 1.0  # without Retrace

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        actor_encoder: Callable[[Nest], Any] = Encoder,
        actor_mlp: Callable[[int], Any] = MLP,
        critic: Callable[..., Any] = CriticEnsemble,
        gamma: Discount = 0.99,
        lambda_: UnitInterval | None = None,
        target_rate: Rate | None = 0.005,
        target_period: PositiveInt = 1,
        target_subset: PositiveInt | None = None,
        actor_uses_mean: bool = False,
        initial_alpha: PositiveFloat = 1.0,
        learn_alpha: bool = True,
        box_target_entropy: FiniteFloat | None = None,
        discrete_entropy_fraction: UnitInterval = 0.5,
        retrace: bool = False,
        lower_bound: bool = False,
        reward_weights: RewardWeights | None = None,
        values: Callable[..., Any] | None = None,
        actor_period: PositiveInt = 1,
        actor_statistics_always: bool = False,
        joint_pass: bool | Literal["with_actor"] = False,
        noise: Callable[[int], Any] | None = None,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, noise, records_probability=retrace)
        self.values = values_of(self, reward_spec, gamma, reward_weights, has_bonus=True, distribution=values)
        self.make_networks(actor_encoder, actor_mlp, self.values.sized(critic))
        self.target_critic = target_of(self.critic, target_rate, target_period)
        target_entropies = box_target_entropy, discrete_entropy_fraction
        self.temperatures = Temperatures(self.action_space, initial_alpha, learn_alpha, *target_entropies)
        self.replay_needs = ReplayNeeds(DrawnAction._fields if retrace else (), self.values.return_gamma(lower_bound))
        self._lambda = (1.0 if retrace else self.default_lambda) if lambda_ is None else lambda_
        self.values.check(self, self._lambda, retrace=retrace, discrete_actions=self.action_space.num_choices > 0)
        self._passes = critic_passes(self, target_subset, joint_pass, retrace)
        self._actor_uses_mean, self._lower_bound, self.actor_period = actor_uses_mean, lower_bound, actor_period
        self._actor_statistics_always = actor_statistics_always

    def parameter_groups(self) -> dict:
        actor = nn.ModuleList([self.actor_encoder, self.actor_mlp, self.policy_head])
        groups = {"critic": self.critic, "actor": actor, "alpha": self.temperatures}
        return {name: module.parameters() for name, module in groups.items()}

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        if not (self.records_probability or self.replay_needs.recurrent_state):
            experience = transitions(experience, self._lambda)
        features, mask, moments = self.window_features(experience), self.discrete_mask(experience.time_step), Moments()
        split, num_rows = self.action_space.split, features.critic.shape[0]
        taken = split(nest.at(experience.action, slice(0, num_rows)))
        later = split(nest.at(experience.action, slice(1, None))) if self.records_probability else None
        with torch.no_grad():
            policy = self.policy(features.next_actor, None if mask is None else mask[1:])
            drawn = policy.choose()
        raw_q, next_q = self._passes.online(experience, features, taken.box, drawn.box, moments)
        q = self.values.each(taken.value, raw_q)  # [E, T', N] or [E, T', N, K]
        # Neither the target critics nor the policy's next actions take a gradient.
        boxes = [drawn.box] if later is None else [drawn.box, later.box]
        least, *later_q = self._passes.following(experience, features, taken.box, boxes, next_q)
        value = self.values.each(drawn.expectation, least)
        following = NextValues(self.temperatures.soft(self.values, value, drawn.entropies()))
        if later is not None:
            trace = behaviour_trace(experience, policy.log_prob(later))
            following = following._replace(q=self.values.each(later.value, *later_q), trace=trace)
        if not self.trains_actor():
            if self._actor_statistics_always:
                self.trained_policy(features, mask, moments)  # collects its moments
            return AlgStep(info=SACTrain(q, following, None, {}, moments))
        choice = self.trained_policy(features, mask, moments).choose()
        own_q, entropies = self.critic(features.critic.detach(), choice.box), choice.entropies()  # trains no encoder
        joined_q = self.values.average(own_q) if self._actor_uses_mean else self.values.least(own_q)
        value = self.temperatures.soft(self.values, self.values.each(choice.expectation, joined_q), entropies)
        return AlgStep(info=SACTrain(q, following, self.values.scalarized(value), entropies, moments))

    def calc_loss(self, experience: Experience, info: SACTrain) -> LossInfo:
        num_rows = info.q.shape[1]
        target = self.values.target(experience, info.following, self._lambda, self._lower_bound)[:num_rows]
        critic_loss, error = self.values.loss(info.q, target)  # [E, T', N]
        loss, error = {"critic": critic_loss.sum(0)}, error.mean(0)
        if info.value is not None:
            loss["actor"] = -info.value
            if self.temperatures.learned:
                mask = self.discrete_mask(experience.time_step)
                loss["alpha"] = self.temperatures.loss(info.entropies, None if mask is None else mask[:num_rows])
        extra = {name: each.mean(0) for name, each in self.values.shown(info.q, target).items()} | {"td_error": error}
        extra |= self.temperatures.shown(info.entropies)
        return LossInfo(loss, extra=extra, priority=error, buffers=info.moments)

    def after_update(self) -> None:
        super().after_update()
        self.target_critic.update(self.critic)
