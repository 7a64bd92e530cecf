"""Soft actor-critic with learned temperatures: off-policy, for Box and Discrete actions.

    y = r + gamma d (min_k Q'_k(s', a') - alpha log pi(a' | s')),   a' ~ pi(. | s'),   d = 0 at a termination, else 1
    critics:       (Q_k(s, a) - y)^2 / 2
    actor:         alpha log pi(a | s) - min_k Q_k(s, a),          a ~ pi(. | s)
    temperature:   log alpha (-log pi(a | s) - target entropy),    differentiated for log alpha only

`train_step` computes the soft value of the next row by `Temperatures.soft`; `calc_loss` computes the target y by
`values.Scalar.target`, which calls `targets.td_target` and `returns.lambda_return`. The learner takes the mean of each
loss over trainable rows. Each loss trains only the parameter group of the same name (`learner/groups.py`).

Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905. Discrete: Christodoulou, 2019, https://arxiv.org/abs/1910.07207.

The action has Box leaves and at most one Discrete leaf (`soft_actor`); each of the two kinds has a temperature. The
losses use only row 0 of a window, with a return of the window's length.

Variants are in `redq` (REDQ and TQC), `retrace`, `recurrent_sac`, `crossq` (CrossQ and XQC) and `flashsac`.

Differences from the papers: all losses are computed before any parameter changes, while the papers update the critics
before the actor; a truncated episode bootstraps from its true final observation; the temperature's loss is linear in
log alpha, as in the authors' code (`Temperatures.linear_in`); the target entropy of Discrete actions is half of the
maximum, while Christodoulou uses 0.98 of the maximum; n-step returns omit the entropies between the first and the last
row.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.algorithms.rl_algorithm import ReplayNeeds
from alfish.algorithms.soft_actor import SoftActor
from alfish.data import AlgStep, Experience, LossInfo
from alfish.functional.targets import NextValues
from alfish.functional.values import Discount, RewardWeights, values_of
from alfish.nest import Nest
from alfish.networks import MLP, CriticEnsemble, Encoder, Features, first_and_bootstrap_rows
from alfish.networks.hybrid import Choice, HybridPolicy, Temperatures
from alfish.networks.target import target_of
from alfish.parameters import FiniteFloat, PositiveFloat, PositiveInt, Rate, UnitInterval, checked


class SACTrain(NamedTuple):
    """Outputs at the T' rows that the losses use: row 0, or with memory all rows but the last."""

    q: torch.Tensor  # [E, T', N] or [E, T', N, K] values of the taken action
    following: NextValues  # soft values of rows 1 to L-1, or of the bootstrap row, from the target critics
    value: torch.Tensor | None  # [T', N] soft value of the current policy; None if the actor does not train
    entropies: dict[str, torch.Tensor]  # [T', N] entropies of the current policy; empty if the actor does not train


@gin.configurable(module="alfish.algorithms")
@checked
class SAC(SoftActor):
    """Soft actor-critic; see the module's docstring for the papers and the differences from them.

    Args:
      actor_encoder: class or factory of the actor's encoder; called with the observation spec.
      actor_mlp: class or factory of the layers after the encoder; called with the encoder's output size.
      critic: class or factory of the critics; called with (observation_spec, action_size, num_outputs). The module
        that it returns has an attribute `ensemble_size`.
      gamma: discount per environment step, in [0, 1]; a list has one discount for each entry of a vector reward.
      lambda_: weight of longer returns within a window, in [0, 1]; 1 bootstraps only at the last row, and 0 gives the
        one-step return; None means 1, or 0 in `RecurrentSAC`.
      target_rate: step size of the target critics' updates, in (0, 1]; None means no target critics: the critics
        themselves compute the targets.
      target_period: number of updates of the critics for each update of the target critics.
      initial_alpha: temperature (weight of the entropy) at the start of training.
      learn_alpha: whether temperatures are learned.
      box_target_entropy: target entropy of the Box leaves in nats; None means minus the number of their entries.
      discrete_entropy_fraction: target entropy of the Discrete leaf, as a fraction in [0, 1] of the maximum log n for n
        choices; with a mask, n is the number of choices that the mask allows at a row.
      actor_period: number of updates of the critics for each update of the actor and the temperatures.
      reward_weights: initial weight of each reward entry, kept in the buffer `values.weights`; None means 1 for all.
      values: class or factory of the value representation, called with gamma; requires a scalar reward. `@Bins` and
        `@Quantiles` are distributions of the return, for Box actions only; `@LowerBounded` is the expected return with
        lower bounds. None means the expected return.
    """

    on_policy = False
    weighted_losses = ("critic",)
    default_lambda: ClassVar[float] = 1.0
    needs_every_row: ClassVar[bool] = False  # whether targets read all rows of a window, not only the first and last

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
        initial_alpha: PositiveFloat = 1.0,
        learn_alpha: bool = True,
        box_target_entropy: FiniteFloat | None = None,
        discrete_entropy_fraction: UnitInterval = 0.5,
        actor_period: PositiveInt = 1,
        reward_weights: RewardWeights | None = None,
        values: Callable[..., Any] | None = None,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.values = values_of(self, reward_spec, gamma, reward_weights, has_bonus=True, kind=values)
        self.make_networks(actor_encoder, actor_mlp, self.values.sized(critic))
        self.target_critic = target_of(self.critic, target_rate, target_period)
        self.temperatures = Temperatures(
            self.action_space, initial_alpha, learn_alpha, box_target_entropy, discrete_entropy_fraction
        )
        self.update_periods = {"actor": actor_period}  # the temperatures have losses in the same updates as the actor
        self.replay_needs = ReplayNeeds(return_gamma=self.values.return_gamma)
        self._lambda = self.default_lambda if lambda_ is None else lambda_
        self.values.check(self, self._lambda, discrete_actions=self.action_space.num_choices > 0)

    def parameter_groups(self) -> dict:
        actor = nn.ModuleList([self.actor_encoder, self.actor_mlp, self.policy_head])
        groups = {"critic": self.critic, "actor": actor, "alpha": self.temperatures}
        return {name: module.parameters() for name, module in groups.items()}

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        if not self.needs_every_row:  # from here L is 2 unless 0 < lambda < 1; `calc_loss` receives all rows
            experience = first_and_bootstrap_rows(experience, self._lambda)
        features, mask = self.window_features(experience), self.discrete_mask(experience.time_step)
        num_rows = features.critic.shape[0]  # number of rows that the losses use
        taken = self.action_space.split(nest.at(experience.action, slice(0, num_rows)))
        with torch.no_grad():
            next_policy = self.policy(features.next_actor, None if mask is None else mask[1:])
            drawn = next_policy.choose()
        q = self.values.each(taken.select, self.critic(features.critic, taken.box))
        following = self.next_values(experience, features, next_policy, drawn)
        if not self.trains("actor"):
            return AlgStep(info=SACTrain(q, following, None, {}))
        choice = self.policy(features.actor, None if mask is None else mask[:num_rows]).choose()
        # The actor's loss does not train the critics; detach keeps the critics' encoder out of the graph.
        policy_q, entropies = self.critic(features.critic.detach(), choice.box), choice.entropies()
        value = self.values.scalarized(self.soft_value(self.actor_q(policy_q), choice, entropies))
        return AlgStep(info=SACTrain(q, following, value, entropies))

    def next_values(
        self, experience: Experience, features: Features, policy: HybridPolicy, drawn: Choice
    ) -> NextValues:
        """Returns the values of rows 1 to L-1 from which the target y is computed, without gradient.

        Args:
          experience: rows `[L, N]`.
          features: inputs of the networks at these rows.
          policy: policy at rows 1 to L-1.
          drawn: actions that this policy drew.

        `RetraceSAC` also reads `experience` and `policy`.
        """
        q = self.target_critic(features.next_critic, drawn.box)
        return NextValues(self.soft_value(self.target_q(q), drawn, drawn.entropies()))

    def soft_value(self, q: torch.Tensor, choice: Choice, entropies: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns soft values `[..., K]`: q, or the mean of q over Discrete choices, plus alpha times the entropy."""
        return self.temperatures.soft(self.values, self.values.each(choice.expectation, q), entropies)

    def target_q(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the values `[...]` for targets, from the values `[E, ...]` of the target critics."""
        return self.values.least(q)

    def actor_q(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the values `[...]` that the actor maximizes, from the values `[E, ...]` of the critics."""
        return self.values.least(q)

    def calc_loss(self, experience: Experience, info: SACTrain) -> LossInfo:
        num_rows = info.q.shape[1]
        target = self.values.target(experience, info.following, self._lambda)[:num_rows]
        critic_loss, error = self.values.loss(info.q, target)  # [E, T', N]
        loss, error = {"critic": critic_loss.sum(0)}, error.mean(0)
        if info.value is not None:
            loss["actor"] = -info.value
            if self.temperatures.learned:
                mask = self.discrete_mask(experience.time_step)
                loss["alpha"] = self.temperatures.loss(info.entropies, None if mask is None else mask[:num_rows])
        shown = {name: each.mean(0) for name, each in self.values.shown(info.q, target).items()}
        shown |= {"td_error": error} | self.temperatures.shown(info.entropies)
        return LossInfo(loss, extra=shown, priority=error)

    def after_update(self) -> None:
        self.target_critic.update(self.critic)
