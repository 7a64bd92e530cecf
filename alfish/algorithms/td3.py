"""Deterministic policy gradients, off-policy, for Box actions: DDPG, TD3, and TD3BC for recorded data.

DDPG: Lillicrap et al., 2016, https://arxiv.org/abs/1509.02971. TD3: Fujimoto et al., 2018,
https://arxiv.org/abs/1802.09477. TD3BC: Fujimoto & Gu, 2021, https://arxiv.org/abs/2106.06860.

Differences from the papers: a truncated episode bootstraps from its true final observation; one number sets the
correlation of exploration noise, which starts from zero in each episode.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import gin
import torch
from gymnasium import spaces

from alfish import losses, nest, replicas, returns
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import ONE_CRITIC, CriticEnsemble, DeterministicActor, TargetNetwork
from alfish.objectives import Discount, RewardWeights, objectives_of
from alfish.parameters import NonNegativeFloat, PositiveInt, Range, Rate, checked
from alfish.schedules import Schedule, as_schedule


class DDPGTrain(NamedTuple):
    q: torch.Tensor  # [E, 1, N] or [E, 1, N, R] of the taken action at row 0
    next_value: torch.Tensor  # [L-1, N] or [L-1, N, R] of rows 1 to L-1
    policy_q: torch.Tensor | None  # [1, N] of the actor's action at row 0; None: the actor does not train
    policy_action: torch.Tensor | None  # [1, N, A], the actor's action at row 0; None: the actor does not train
    action: torch.Tensor  # [1, N, A] taken at row 0


@gin.configurable(module="alfish.algorithms")
@checked
class DDPG(RLAlgorithm):
    """Deep deterministic policy gradients; the module's docstring has the papers and the differences from them.

    Args:
      actor: takes (observation_spec, action_size).
      critic: takes (observation_spec, action_size); an ensemble of one or more. Its minimum is the target; its first
        critic (`num_members=1`) trains the actor.
      gamma: discount per environment step; a list: one for each entry of a vector reward.
      target_rate: of the update of both target networks, after each update.
      noise_std: of exploration noise, in units of half the action's range; number or schedule.
      noise_correlation: between the noise of consecutive steps, in [0, 1); 0 is white noise. Noise is policy state.
      reward_weights: of the entries of a vector reward; the buffer `objectives.weights` begins with them. None: 1.
    """

    on_policy = False
    weighted_losses: tuple[str, ...] | None = ("critic",)

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
        self.actor = actor(observation_spec, sum(self._sizes))
        self.objectives = objectives_of(self, reward_spec, gamma, reward_weights)
        self.critic = self.objectives.sized(critic)(observation_spec, sum(self._sizes))
        self.target_actor = TargetNetwork(self.actor, target_rate)
        self.target_critic = TargetNetwork(self.critic, target_rate)
        self._noise_std, self._noise_correlation = as_schedule(noise_std), noise_correlation

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        for name, leaf in nest.named_leaves(action_spec, "action"):
            if not (isinstance(leaf, spaces.Box) and leaf.is_bounded("both")):
                raise UsageError(f"{cls.__name__} takes bounded Box actions, and the {name} is {leaf}; train with PPO")

    def parameter_groups(self) -> dict:
        return {"critic": self.critic.parameters(), "actor": self.actor.parameters()}

    def initial_state(self, batch_size: int) -> Nest:
        return torch.zeros(batch_size, sum(self._sizes)) if self._noise_correlation else None

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        action = self.actor(time_step.observation)
        noise = torch.randn_like(action)
        if state is not None:
            rho = self._noise_correlation
            state = noise = rho * state + math.sqrt(1 - rho**2) * noise
        return AlgStep(self._nested((action + self._noise_std(self.progress) * noise).clamp(-1, 1)), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        return AlgStep(self._nested(self.actor(time_step.observation)), state)

    def target_action(self, observation: Nest) -> torch.Tensor:
        """Returns the action of the target policy, `[..., A]`; TD3 adds noise to it."""
        return self.target_actor(observation)

    def trains_actor(self) -> bool:
        """Returns True if the next update trains the actor, which TD3 delays."""
        return True

    def actor_loss(self, policy_q: torch.Tensor, policy_action: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Returns the loss `[1, N]`.

        Args:
          policy_q: `[1, N]`, the critic's value of the actor's action.
          policy_action: `[1, N, A]`, the actor's action.
          action: `[1, N, A]`, the recorded action.
        """
        return -policy_q

    def graph_key(self) -> bool:
        return self.trains_actor()

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        now, later = nest.split(experience.time_step, 1)
        action = torch.cat(nest.leaves(nest.at(experience.action, slice(0, 1))), -1)
        features, _ = self.critic.features(now, None)
        q = self.critic(features, action)
        with torch.no_grad():
            target_features, _ = self.target_critic.network.features(later, None)
            next_q = self.target_critic(target_features, self.target_action(later.observation))
            next_value = self.objectives.least(next_q)
        policy_q = policy_action = None
        if self.trains_actor():  # by the first critic, as in TD3's algorithm 1
            policy_action = self.actor(now.observation)
            policy_q = self.objectives.scalarized(self.critic(features, policy_action, num_members=1)[0])
        return AlgStep(info=DDPGTrain(q, next_value, policy_q, policy_action, action))

    def calc_loss(self, experience: Experience, info: DDPGTrain) -> LossInfo:
        step = experience.time_step  # [L, N]
        target = returns.discounted_return(*self.objectives.rows(step), info.next_value, step.step_type)[:1]
        error = target - info.q  # [E, 1, N] or [E, 1, N, R]
        loss = {"critic": self.objectives.total(losses.squared(error).sum(0))}
        if info.policy_q is not None and info.policy_action is not None:
            loss["actor"] = self.actor_loss(info.policy_q, info.policy_action, info.action)
        td_error = self.objectives.magnitude(error).mean(0)
        extra = {"q": self.objectives.scalarized(info.q.mean(0)), "td_error": td_error}
        return LossInfo(loss, extra=extra, priority=td_error)

    def after_update(self) -> None:
        self.target_actor.update(self.actor)
        self.target_critic.update(self.critic)

    def _nested(self, action: torch.Tensor) -> Nest:
        parts = iter(action.split(self._sizes, -1))
        return nest.map(lambda _: next(parts), self.action_spec)


@gin.configurable(module="alfish.algorithms")
@checked
class TD3(DDPG):
    """DDPG with the minimum of two critics, noise on target actions, and delayed updates of the actor.

    Args:
      critic: as in DDPG; two by default.
      smoothing_std, smoothing_clip: of the noise on target actions, in units of half the action's range.
      actor_period: updates of the critics for each update of the actor and of the target networks.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        critic: Callable[..., Any] = CriticEnsemble,
        smoothing_std: NonNegativeFloat = 0.2,
        smoothing_clip: NonNegativeFloat = 0.5,
        actor_period: PositiveInt = 2,
        **ddpg_arguments,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, critic=critic, **ddpg_arguments)
        self._smoothing_std, self._smoothing_clip, self._actor_period = smoothing_std, smoothing_clip, actor_period
        self._num_updates = 0

    def target_action(self, observation: Nest) -> torch.Tensor:
        action = self.target_actor(observation)
        noise = (self._smoothing_std * torch.randn_like(action)).clamp(-self._smoothing_clip, self._smoothing_clip)
        return (action + noise).clamp(-1, 1)

    def trains_actor(self) -> bool:
        return (self._num_updates + 1) % self._actor_period == 0

    def after_update(self) -> None:
        trained = self.trains_actor()
        self._num_updates += 1
        if trained:
            super().after_update()

    def get_extra_state(self) -> dict[str, int]:
        return {"num_updates": self._num_updates}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self._num_updates = state["num_updates"]


@gin.configurable(module="alfish.algorithms")
@checked
class TD3BC(TD3):
    """TD3 whose actor stays close to the recorded actions, for data that are not added to.

        loss = (pi(s) - a)^2 - alpha / mean |Q(s, pi(s))| Q(s, pi(s)),   the square averaged over the action's entries

    The mean of |Q| is over the minibatch of all learners, without gradient. The paper also normalizes observations: add
    an `ObservationNormalizer` to the transforms.

    Args:
      alpha: weight of Q, which is divided by its mean magnitude; 0 is behavioural cloning.
    """

    weighted_losses = None  # also the actor's: it clones each action as often as it is drawn

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        alpha: NonNegativeFloat = 2.5,
        **td3_arguments,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **td3_arguments)
        self._alpha = alpha

    def actor_loss(self, policy_q: torch.Tensor, policy_action: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        magnitude = policy_q.detach().abs()
        scale = self._alpha / replicas.mean(magnitude.mean(), magnitude >= 0).clamp(min=1e-8)
        return (policy_action - action).square().mean(-1) - scale * policy_q
