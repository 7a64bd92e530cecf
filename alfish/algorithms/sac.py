"""Soft actor-critic with learned temperatures: off-policy, for Box and Discrete actions.

Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905. Discrete: Christodoulou, 2019, https://arxiv.org/abs/1910.07207.
Retrace: Munos et al., 2016, https://arxiv.org/abs/1606.02647. Lower bounds: He et al., 2017,
https://arxiv.org/abs/1611.01606.

The action is a nest of Box leaves and at most one Discrete leaf (`networks.hybrid_policy`). Box entries are inputs of
the critics, which have one output for each Discrete choice. Each of the two kinds has its own temperature. REDQ (Chen
et al., 2021), DroQ and RLPD are settings: ensemble size, target subset, layer norm, dropout. Row 0 of a window trains.

Differences from the papers: a truncated episode bootstraps from its true final observation; the temperature's loss is
linear in log alpha; n-step returns without Retrace leave out the entropies of the rows in between.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import losses, nest, specs
from alfish.algorithms.rl_algorithm import ReplayNeeds, RLAlgorithm
from alfish.corrections import behaviour_trace
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.distributions import sum_of
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import MLP, CriticEnsemble, Encoder, Features, HybridHead, HybridPolicy, HybridSpace, TargetNetwork
from alfish.objectives import Discount, RewardWeights, objectives_of
from alfish.parameters import FiniteFloat, PositiveFloat, PositiveInt, Rate, UnitInterval, checked
from alfish.parameters.parts import build_network
from alfish.targets import NextValues, td_target


class SACRollout(NamedTuple):
    """Probability of an action when it was drawn, for Retrace."""

    log_prob: torch.Tensor  # [B] of the sample, all leaves together
    action: Nest  # the sample; log_prob does not hold where another action was executed (random, or by hand)


class SACTrain(NamedTuple):
    """Outputs of the rows that train."""

    q: torch.Tensor  # [E, T', N] or [E, T', N, R] of the taken action
    following: NextValues  # soft values of rows 1 to L-1, by the target critics
    value: torch.Tensor  # [T', N] soft value of the present policy, which the actor maximizes
    entropies: dict[str, torch.Tensor]  # [T', N] of the present policy


@gin.configurable(module="alfish.algorithms")
@checked
class SAC(RLAlgorithm):
    """Soft actor-critic; the module's docstring has the papers and the differences from them.

    Args:
      actor_encoder: takes the observation spec.
      actor_mlp: takes the encoder's output size.
      critic: takes (observation_spec, action_size, num_outputs); has an `ensemble_size`.
      gamma: discount per environment step; a list: one for each entry of a vector reward.
      lambda_: of the return within a window; 1 bootstraps at the last row only, 0 is the one-step return. None: 1.
      target_rate, target_period: of the target critics' updates.
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
      reward_weights: of the entries of a vector reward; the buffer `objectives.weights` begins with them. None: 1.
    """

    on_policy = False
    weighted_losses = ("critic",)
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
        target_rate: Rate = 0.005,
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
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.action_space = HybridSpace(action_spec)
        self.objectives = objectives_of(self, reward_spec, gamma, reward_weights, has_bonus=True)
        self.make_networks(actor_encoder, actor_mlp, self.objectives.sized(critic))
        size = self.critic.ensemble_size
        if target_subset is not None and target_subset > size:
            raise UsageError(f"SAC.target_subset is {target_subset}; it must be at most {size}, the number of critics")
        self.target_critic = TargetNetwork(self.critic, target_rate, target_period)
        self._target_entropy = self.action_space.target_entropies(box_target_entropy, discrete_entropy_fraction)
        alphas = {kind: torch.tensor(math.log(initial_alpha)) for kind in self._target_entropy}
        self.log_alpha = nn.ParameterDict({kind: nn.Parameter(alpha, learn_alpha) for kind, alpha in alphas.items()})
        self.replay_needs = ReplayNeeds(
            SACRollout._fields if retrace else (), self.objectives.return_gamma(lower_bound)
        )
        self._lambda = (1.0 if retrace else self.default_lambda) if lambda_ is None else lambda_
        self._target_subset, self._actor_uses_mean, self._learn_alpha = target_subset, actor_uses_mean, learn_alpha
        self._retrace, self._lower_bound = retrace, lower_bound

    def make_networks(
        self, actor_encoder: Callable[[Nest], Any], actor_mlp: Callable[[int], Any], critic: Callable[..., Any]
    ) -> None:
        """Makes actor and critics; their order decides which weights a seed gives."""
        self.actor_encoder: Any = build_network(actor_encoder, "SAC.actor_encoder", self.observation_spec)
        self.actor_mlp = build_network(actor_mlp, "SAC.actor_mlp", self.actor_encoder.output_size)
        self.policy_head = HybridHead(self.actor_mlp.output_size, self.action_space)
        sizes, has = self.action_space.critic_sizes, ("features", "ensemble_size")
        self.critic: Any = build_network(critic, "SAC.critic", self.observation_spec, *sizes, has=has)

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        specs.check_hybrid_action(cls.__name__, action_spec)

    def parameter_groups(self) -> dict:
        actor = nn.ModuleList([self.actor_encoder, self.actor_mlp, self.policy_head])
        groups = {"critic": self.critic, "actor": actor, "alpha": self.log_alpha}
        return {name: module.parameters() for name, module in groups.items()}

    def actor_features(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns the actor's input, and the next state."""
        return self.actor_encoder(time_step.observation), state

    def policy(self, features: torch.Tensor, mask: torch.Tensor | None) -> HybridPolicy:
        """Returns the policy from the actor's input, and the mask of the Discrete leaf."""
        return self.policy_head(self.actor_mlp(features), mask)

    def discrete_mask(self, time_step: TimeStep) -> torch.Tensor | None:
        """Returns the allowed Discrete choices `[..., n]` bool; None: all."""
        masks = () if self.action_masks is None else self.action_masks(time_step.observation)
        return next((mask for mask in masks if mask is not None), None)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.actor_features(time_step, state)
        policy = self.policy(features, self.discrete_mask(time_step))
        sample = policy.sample()
        action = self.action_space.join(sample)
        return AlgStep(action, state, SACRollout(policy.log_prob(sample), action) if self._retrace else None)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self.actor_features(time_step, state)
        policy = self.policy(features, self.discrete_mask(time_step))
        return AlgStep(self.action_space.join(policy.mode()), state)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[B]` of rows `[B]`: the critics' minimum for the policy's most likely action."""
        action = self.action_space.split(self.predict_step(time_step, state).output)
        q = self.critic(self.critic.features(time_step, state)[0], action.box)
        return self.objectives.scalarized(self.objectives.least(self.objectives.each(action.value, q)))

    def window_features(self, experience: Experience) -> Features:
        """Returns the inputs of the networks for a window `[L, N]`; those of rows 1 to L-1 take no gradient."""
        now, later = nest.split(experience.time_step, 1)
        critic, actor = self.critic.features(now, None)[0], self.actor_encoder(now.observation)
        with torch.no_grad():
            next_actor = self.actor_encoder(later.observation)
            next_critic = self.target_critic.network.features(later, None)[0]
        return Features(critic, actor, next_actor, next_critic)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        features = self.window_features(experience)
        taken = self.action_space.split(nest.at(experience.action, slice(0, features.critic.shape[0])))
        q = self.objectives.each(taken.value, self.critic(features.critic, taken.box))  # [E, T', N] or [E, T', N, R]
        mask = self.discrete_mask(experience.time_step)
        with torch.no_grad():
            following = self._next_values(experience, features, None if mask is None else mask[1:])
        choice = self.policy(features.actor, None if mask is None else mask[: len(features.actor)]).choose()
        own_q = self.critic(features.critic.detach(), choice.box)  # the actor's loss does not train the encoder
        joined_q = own_q.mean(0) if self._actor_uses_mean else self.objectives.least(own_q)
        expected_q = self.objectives.each(choice.expectation, joined_q)
        entropies = choice.entropies()
        value = self._soft(expected_q, entropies)
        return AlgStep(info=SACTrain(q, following, self.objectives.scalarized(value), entropies))

    def calc_loss(self, experience: Experience, info: SACTrain) -> LossInfo:
        target = td_target(experience, self.objectives, self._lambda, info.following, self._lower_bound)
        error = target[: info.value.shape[0]] - info.q  # [E, T', N] or [E, T', N, R]
        td_error = self.objectives.magnitude(error).mean(0)
        loss = {"critic": self.objectives.total(losses.squared(error).sum(0)), "actor": -info.value}
        if self._learn_alpha:
            targets = self._target_entropies(experience.time_step, len(info.value))
            loss["alpha"] = sum_of(
                self.log_alpha[kind] * (entropy - targets[kind]).detach() for kind, entropy in info.entropies.items()
            )
        extra = {"q": self.objectives.scalarized(info.q.mean(0)), "td_error": td_error}
        for kind, entropy in info.entropies.items():
            extra |= {f"entropy_{kind}": entropy, f"alpha_{kind}": self.log_alpha[kind].exp()}
        return LossInfo(loss, extra=extra, priority=td_error)

    def after_update(self) -> None:
        self.target_critic.update(self.critic)

    def _soft(self, value: torch.Tensor, entropies: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the value with a bonus for entropy: V = E[Q] + sum of alpha H over the parts of the action."""
        for kind, entropy in entropies.items():
            alpha = self.log_alpha[kind].exp().detach()  # it has a loss of its own
            value = self.objectives.with_bonus(value, alpha * entropy)
        return value

    def _target_entropies(self, time_step: TimeStep, num_rows: int) -> dict[str, Any]:
        """Returns the target entropy of each part; with a mask, of the Discrete part for each row, `[T', N]`."""
        mask = self.discrete_mask(time_step)
        if mask is None:
            return self._target_entropy
        maximum = mask[:num_rows].sum(-1).clamp(min=1).log() / math.log(self.action_space.num_choices)
        return self._target_entropy | {"discrete": self._target_entropy["discrete"] * maximum}

    def _next_values(self, experience: Experience, features: Features, mask: torch.Tensor | None) -> NextValues:
        """Returns soft values of rows 1 to L-1; for Retrace, also values and traces of the actions taken there."""
        policy = self.policy(features.next_actor, mask)
        choice = policy.choose()
        taken_q = trace = None
        if self._retrace:
            taken = self.action_space.split(nest.at(experience.action, slice(1, None)))
            q, taken_q = self._target_q(features.next_critic, choice.box, taken.box)
            taken_q = self.objectives.each(taken.value, taken_q)
            trace = behaviour_trace(experience, policy.log_prob(taken))
        else:
            (q,) = self._target_q(features.next_critic, choice.box)
        return NextValues(self._soft(self.objectives.each(choice.expectation, q), choice.entropies()), taken_q, trace)

    def _target_q(self, features: torch.Tensor, *boxes: torch.Tensor | None) -> list[torch.Tensor]:
        """Returns the target critics' minimum for each Box action; of one random subset of critics for all."""
        each_q = [self.target_critic(features, box) for box in boxes]
        if self._target_subset is not None:
            members = torch.randperm(len(each_q[0]), device=features.device)[: self._target_subset]
            each_q = [q[members] for q in each_q]
        return [self.objectives.least(q) for q in each_q]
