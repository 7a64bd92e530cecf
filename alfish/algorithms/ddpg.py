"""Deep deterministic policy gradients, off-policy, for Box actions; also the base class of TD3.

Lillicrap et al., 2016, https://arxiv.org/abs/1509.02971.

Differences from the paper: a truncated episode bootstraps from its true final observation; exploration noise has one
setting for its correlation, and starts from zero in each episode.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.functional.targets import NextValues
from alfish.functional.values import Discount, RewardWeights, values_of
from alfish.nest import Nest
from alfish.networks import ONE_CRITIC, DeterministicActor, Features, TargetNetwork, first_and_bootstrap_rows
from alfish.parameters import NonNegativeFloat, Range, Rate, checked
from alfish.parameters.parts import build_network, check_forward
from alfish.parameters.schedules import Schedule, as_schedule


class DDPGTrain(NamedTuple):
    """Outputs at the T' rows that the losses use: row 0, or with memory all rows but the last."""

    q: torch.Tensor  # [E, T', N] or [E, T', N, R] values of the taken action
    next_value: torch.Tensor  # [L-1, N] or [L-1, N, R] values of rows 1 to L-1, or of the bootstrap row
    policy_q: torch.Tensor | None  # [T', N] value of the actor's action; None if the actor does not train
    policy_action: torch.Tensor | None  # [T', N, A] the actor's action; None if the actor does not train
    action: torch.Tensor  # [T', N, A] the taken action


@gin.configurable(module="alfish.algorithms")
@checked
class DDPG(RLAlgorithm):
    """Deep deterministic policy gradients; see the module's docstring for the paper and the differences from it.

    Args:
      actor: class or factory of the actor; called with (observation_spec, action_size).
      critic: class or factory of an ensemble of one or more critics; called with (observation_spec, action_size). The
        critics learn from the minimum of the target critics; the actor maximizes the first critic, which is called with
        `num_members=1`.
      gamma: discount per environment step, in [0, 1]; a list has one discount for each entry of a vector reward.
      target_rate: step size of the updates of both target networks, in (0, 1]; both are updated after each update of
        the actor.
      noise_std: standard deviation of exploration noise, in units of half the action's range; a number or a schedule
        of progress.
      noise_correlation: correlation between the noise of consecutive steps, in [0, 1); 0 is white noise. The noise is
        part of the policy's state.
      reward_weights: initial weight of each reward entry, kept in the buffer `values.weights`; None means 1 for all.
    """

    on_policy = False
    feature_module = "critic.encoder"
    weighted_losses: tuple[str, ...] | None = ("critic",)
    lambda_: ClassVar[float] = 1.0  # 1 bootstraps at a window's last row, 0 after one step

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        actor: Callable[..., Any] = DeterministicActor,
        critic: Callable[..., Any] = ONE_CRITIC,
        gamma: Discount = 0.99,
        target_rate: Rate = 0.005,
        noise_std: NonNegativeFloat | Schedule = 0.1,
        noise_correlation: Annotated[float, Range(0, 1, below=True)] = 0.0,
        reward_weights: RewardWeights | None = None,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self._sizes = [leaf.shape[0] for leaf in nest.leaves(action_spec)]
        self.values = values_of(self, reward_spec, gamma, reward_weights)
        self.make_networks(actor, self.values.sized(critic), sum(self._sizes))
        self.target_actor = TargetNetwork(self.actor, target_rate)
        self.target_critic = TargetNetwork(self.critic, target_rate)
        self._noise_std, self._noise_correlation = as_schedule(noise_std), noise_correlation

    def make_networks(self, actor: Callable[..., Any], critic: Callable[..., Any], action_size: int) -> None:
        """Makes actor and critics in a fixed order, because initial weights depend on the order."""
        self.actor = build_network(actor, f"{type(self).__name__}.actor", self.observation_spec, action_size, has=())
        self.critic = build_network(
            critic, f"{type(self).__name__}.critic", self.observation_spec, action_size, has=("features",), takes=2
        )
        check_forward(self.critic, f"{type(self).__name__}.critic", 2, "num_members")

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        specs.check_box_action(cls.__name__, action_spec)

    def parameter_groups(self) -> dict:
        return {"critic": self.critic.parameters(), "actor": self.actor.parameters()}

    def initial_state(self, batch_size: int) -> Nest:
        return torch.zeros(batch_size, sum(self._sizes)) if self._noise_correlation else None

    def actor_input(self, time_step: TimeStep, state: Nest) -> tuple[Nest, Nest]:
        """Returns the actor's input, and the next state."""
        return time_step.observation, state

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        seen, state = self.actor_input(time_step, state)
        action = self.actor(seen)
        noise = torch.randn_like(action)
        if self._noise_correlation:
            rho = self._noise_correlation
            state = noise = rho * state + math.sqrt(1 - rho**2) * noise
        return AlgStep(self._nested((action + self._noise_std(self.progress) * noise).clamp(-1, 1)), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        seen, state = self.actor_input(time_step, state)
        return AlgStep(self._nested(self.actor(seen)), state)

    def state_value(self, time_step: TimeStep, state: Nest) -> torch.Tensor:
        """Returns the values `[B]` of rows `[B]`: the critics' minimum for the actor's action."""
        action = self.actor(self.actor_input(time_step, state)[0])
        q = self.critic(self.critic.features(time_step, state)[0], action)
        return self.values.scalarized(self.values.least(q))

    def target_action(self, seen: Nest) -> torch.Tensor:
        """Returns the target actor's action `[..., A]` for its input `seen`; TD3 adds noise to the action."""
        return self.target_actor(seen)

    def actor_loss(self, policy_q: torch.Tensor, policy_action: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Returns the loss `[T', N]`; T' is the number of rows that the losses use, 1 without memory.

        Args:
          policy_q: `[T', N]`, the critic's value of the actor's action.
          policy_action: `[T', N, A]`, the actor's action.
          action: `[T', N, A]`, the recorded action.
        """
        return -policy_q

    def next_value(self, features: Features, experience: Experience) -> torch.Tensor:
        """Returns the values `[L-1, N]` of rows 1 to L-1 from which targets are computed: the target critics' minimum.

        Args:
          features: inputs of the networks.
          experience: rows `[L, N]`.
        """
        return self.values.least(self.target_critic(features.next_critic, self.target_action(features.next_actor)))

    def window_features(self, experience: Experience) -> Features:
        """Returns the inputs of the networks for a window `[L, N]`; inputs of rows 1 to L-1 take no gradient."""
        now, later = nest.split(experience.time_step, 1)
        critic, _ = self.critic.features(now, None)
        with torch.no_grad():
            next_critic, _ = self.target_critic.network.features(later, None)
        return Features(critic, now.observation, later.observation, next_critic)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        if not self.replay_needs.recurrent_state:
            experience = first_and_bootstrap_rows(experience, self.lambda_)
        features = self.window_features(experience)
        action = torch.cat(nest.leaves(nest.at(experience.action, slice(0, len(features.critic)))), -1)
        q = self.critic(features.critic, action)
        with torch.no_grad():
            next_value = self.next_value(features, experience)
        policy_q = policy_action = None
        if self.trains("actor"):  # the actor maximizes the first critic, as in TD3's algorithm 1
            policy_action = self.actor(features.actor)
            policy_q = self.values.scalarized(self.critic(features.critic, policy_action, num_members=1)[0])
        return AlgStep(info=DDPGTrain(q, next_value, policy_q, policy_action, action))

    def calc_loss(self, experience: Experience, info: DDPGTrain) -> LossInfo:
        target = self.values.target(experience, NextValues(info.next_value), self.lambda_)[: info.q.shape[1]]
        critic_loss, error = self.values.loss(info.q, target)  # [E, T', N]
        loss = {"critic": critic_loss.sum(0)}
        if info.policy_q is not None and info.policy_action is not None:
            loss["actor"] = self.actor_loss(info.policy_q, info.policy_action, info.action)
        error = error.mean(0)
        shown = {name: each.mean(0) for name, each in self.values.shown(info.q, target).items()}
        return LossInfo(loss, extra=shown | {"td_error": error}, priority=error)

    def after_update(self) -> None:
        self.target_actor.update(self.actor)
        self.target_critic.update(self.critic)

    def _nested(self, action: torch.Tensor) -> Nest:
        parts = iter(action.split(self._sizes, -1))
        return nest.map(lambda _: next(parts), self.action_spec)
