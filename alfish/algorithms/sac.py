"""Soft actor-critic with automatic temperature: off-policy, for Box and Discrete actions.

Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905; Discrete: Christodoulou, 2019, https://arxiv.org/abs/1910.07207.

The action is any nest of Box leaves with at most one Discrete leaf. Box leaves are an input of the critics, the
Discrete one is their outputs, over which expectations are exact. Each kind has its own temperature. REDQ (Chen et al.,
2021), DroQ and RLPD are settings: the size of the ensemble, the subset that targets take the minimum of, layer norm,
dropout.

Differs from the paper: a truncated episode is bootstrapped from its true final observation; the temperature's loss is
linear in log alpha; with windows of more than two rows, the entropies between are left out of n-step returns.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import losses, nest, returns
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import MLP, CriticEnsemble, Encoder, SquashedNormalHead, Target
from alfish.networks.heads import categorical_head


class Choice(NamedTuple):
    """What the policy does at some observations."""

    box: torch.Tensor | None  # [..., A] a sample of all Box leaves, in (-1, 1); None where there is none
    log_density: torch.Tensor  # [...] of that sample; 0 where there is none
    log_p: torch.Tensor | None  # [..., n] of the Discrete leaf; None where there is none

    def entropies(self) -> dict[str, torch.Tensor]:
        """Of each kind, `[...]`: an estimate from the sample for Box, exact for Discrete."""
        found = {} if self.box is None else {"box": -self.log_density}
        if self.log_p is not None:
            found["discrete"] = -(self.log_p.exp() * self.log_p).sum(-1)
        return found


class SACTrain(NamedTuple):
    q: torch.Tensor  # [E, 1, N] of the taken action at row 0
    next_value: torch.Tensor  # [L, N] soft values of later rows; row 0 is not read
    expected_q: torch.Tensor  # [1, N] of the policy's present choice at row 0
    entropies: dict[str, torch.Tensor]  # [1, N] of that choice


@gin.configurable(module="alfish.algorithms")
class SAC(RLAlgorithm):
    """Args:
    actor_encoder: takes the observation spec.
    actor_mlp: takes the encoder's output size.
    critic: takes (observation_spec, action_size, num_outputs), and has an `ensemble_size`.
    gamma: discount per environment step.
    target_rate, target_period: how the target critics follow.
    target_subset: how many critics, drawn at random for each update, targets take the minimum of; None: all.
    actor_uses_mean: the actor maximises the critics' mean (REDQ) in place of their minimum.
    initial_alpha: temperatures at the start.
    learn_alpha: whether temperatures are learned; they stay as they are otherwise.
    box_target_entropy: in nats; None: minus the number of Box entries.
    discrete_target_entropy: in nats; None: `discrete_entropy_share` of the largest, log n.
    discrete_entropy_share: see above.
    """

    on_policy = False

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        actor_encoder: Callable[[Nest], Any] = Encoder,
        actor_mlp: Callable[[int], Any] = MLP,
        critic: Callable[..., Any] = CriticEnsemble,
        gamma: float = 0.99,
        target_rate: float = 0.005,
        target_period: int = 1,
        target_subset: int | None = None,
        actor_uses_mean: bool = False,
        initial_alpha: float = 1.0,
        learn_alpha: bool = True,
        box_target_entropy: float | None = None,
        discrete_target_entropy: float | None = None,
        discrete_entropy_share: float = 0.5,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        leaves = nest.leaves(action_spec)
        self._box_sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, spaces.Box)]
        self._num_choices = next((int(leaf.n) for leaf in leaves if isinstance(leaf, spaces.Discrete)), 0)
        box_size = sum(self._box_sizes)

        self.actor_encoder = actor_encoder(observation_spec)
        self.actor_mlp = actor_mlp(self.actor_encoder.output_size)
        self.box_head = SquashedNormalHead(self.actor_mlp.output_size, box_size) if box_size else None
        self.discrete_head = (
            categorical_head(self.actor_mlp.output_size, self._num_choices) if self._num_choices else None
        )
        self.critic = critic(observation_spec, box_size, max(1, self._num_choices))
        size = self.critic.ensemble_size
        if target_subset is not None and not 1 <= target_subset <= size:
            raise UsageError(f"SAC.target_subset is {target_subset}; it is at least 1 and at most the {size} critics")
        self.target_critic = Target(self.critic, target_rate, target_period)

        self._target_entropy = {}
        if box_size:
            self._target_entropy["box"] = -box_size if box_target_entropy is None else box_target_entropy
        if self._num_choices:
            largest = math.log(self._num_choices)
            automatic = discrete_entropy_share * largest
            self._target_entropy["discrete"] = automatic if discrete_target_entropy is None else discrete_target_entropy
        self.log_alpha = nn.ParameterDict(
            {kind: nn.Parameter(torch.tensor(math.log(initial_alpha)), learn_alpha) for kind in self._target_entropy}
        )
        self._gamma, self._target_subset, self._actor_uses_mean = gamma, target_subset, actor_uses_mean

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        num_discrete = 0
        for path, leaf in zip(nest.paths(action_spec), nest.leaves(action_spec)):
            name = f"action {path}".rstrip()
            if isinstance(leaf, spaces.Box):
                if not leaf.is_bounded("both"):
                    raise UsageError(
                        f"SAC squashes its actions into bounds, and the {name} has none ({leaf}); wrap the "
                        "environment, for example in gymnasium.wrappers.RescaleAction, or train with PPO"
                    )
            elif isinstance(leaf, spaces.Discrete):
                num_discrete += 1
            else:
                raise UsageError(f"SAC takes Box and Discrete actions, and the {name} is {leaf}; train with PPO")
            if isinstance(leaf, spaces.Discrete) and leaf.n < 2:
                raise UsageError(f"the {name} is {leaf}, which leaves nothing to choose; drop it from the action space")
        if num_discrete > 1:
            raise UsageError(f"SAC takes one Discrete action leaf, and this action has {num_discrete}; train with PPO")
        if reward_spec.shape:
            raise UsageError(f"SAC takes a scalar reward, and this one is a vector of {reward_spec.shape[0]}")

    def parameter_groups(self) -> dict:
        actor = [self.actor_encoder, self.actor_mlp, self.box_head, self.discrete_head]
        return {
            "critic": self.critic.parameters(),
            "actor": [p for module in actor if module is not None for p in module.parameters()],
            "alpha": self.log_alpha.parameters(),
        }

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        box, discrete = self._policy(time_step.observation)
        return AlgStep(self._action(box and box.sample(), discrete and discrete.sample()), state)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        box, discrete = self._policy(time_step.observation)
        return AlgStep(self._action(box and box.mode(), discrete and discrete.mode()), state)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        observation = experience.time_step.observation
        now, later = nest.at(observation, slice(0, 1)), nest.at(observation, slice(1, None))
        box, discrete = self._split(nest.at(experience.action, slice(0, 1)))
        q = self.critic(now, box)  # [E, 1, N], or [E, 1, N, n]
        if discrete is not None:
            q = q.gather(-1, discrete.expand(q.shape[:-1]).unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            choice = self._choose(later)
            next_value = self._expect(self._smallest(self.target_critic(later, choice.box)), choice)
            for kind, entropy in choice.entropies().items():
                next_value = next_value + self.log_alpha[kind].exp() * entropy
            next_value = torch.cat([torch.zeros_like(next_value[:1]), next_value])
        choice = self._choose(now)
        all_q = self.critic(now, choice.box)
        expected_q = self._expect(all_q.mean(0) if self._actor_uses_mean else all_q.amin(0), choice)
        return AlgStep(state=state, info=SACTrain(q, next_value, expected_q, choice.entropies()))

    def calc_loss(self, experience: Experience, info: SACTrain) -> LossInfo:
        step = experience.time_step  # [L, N]
        discount = self._gamma * step.discount
        target = returns.discounted_return(step.reward, discount, info.next_value, step.step_type)[:1]
        error = target - info.q  # [E, 1, N]
        actor_loss = -info.expected_q
        alpha_loss = torch.zeros_like(actor_loss)
        extra = {"q": info.q.detach().mean(0), "td_error": error.detach().abs().mean(0)}
        for kind, entropy in info.entropies.items():
            alpha = self.log_alpha[kind].exp().detach()
            actor_loss = actor_loss - alpha * entropy
            excess = (entropy - self._target_entropy[kind]).detach()
            alpha_loss = alpha_loss + self.log_alpha[kind] * excess
            extra |= {f"entropy_{kind}": entropy.detach(), f"alpha_{kind}": alpha}
        loss = {"critic": losses.squared(error).sum(0), "actor": actor_loss, "alpha": alpha_loss}
        if not any(p.requires_grad for p in self.log_alpha.values()):
            del loss["alpha"]
        return LossInfo(loss, extra=extra, priority=error.detach().abs().mean(0)[0])

    def after_update(self) -> None:
        self.target_critic.follow(self.critic)

    def _policy(self, observation: Nest) -> tuple:
        """The distributions of the Box leaves, all in one, and of the Discrete leaf."""
        features = self.actor_mlp(self.actor_encoder(observation))
        return self.box_head and self.box_head(features), self.discrete_head and self.discrete_head(features)

    def _choose(self, observation: Nest) -> Choice:
        box, discrete = self._policy(observation)
        log_p = None if discrete is None else discrete.log_p
        if box is not None:
            sample, log_density = box.sample_with_log_prob()
            return Choice(sample, log_density, log_p)
        return Choice(None, torch.zeros_like(discrete.log_p[..., 0]), log_p)

    def _smallest(self, q: torch.Tensor) -> torch.Tensor:
        """The minimum over the critics, or over a random subset of them."""
        if self._target_subset is not None:
            q = q[torch.randperm(len(q), device=q.device)[: self._target_subset]]
        return q.amin(0)

    def _expect(self, q: torch.Tensor, choice: Choice) -> torch.Tensor:
        """`[...]` from `[...]`, or from `[..., n]` over the Discrete leaf."""
        return q if choice.log_p is None else (choice.log_p.exp() * q).sum(-1)

    def _action(self, box: torch.Tensor | None, discrete: torch.Tensor | None) -> Nest:
        """The action nest from all Box entries in one vector, and the Discrete leaf."""
        parts = iter(() if box is None else box.split(self._box_sizes, -1))
        return nest.map(lambda leaf: next(parts) if isinstance(leaf, spaces.Box) else discrete, self.action_spec)

    def _split(self, action: Nest) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The inverse of `_action`; Box entries as they were executed."""
        specs, leaves = nest.leaves(self.action_spec), nest.leaves(action)
        boxes = [leaf for leaf, spec in zip(leaves, specs) if isinstance(spec, spaces.Box)]
        discrete = [leaf for leaf, spec in zip(leaves, specs) if isinstance(spec, spaces.Discrete)]
        return (torch.cat(boxes, -1) if boxes else None), (discrete[0] if discrete else None)
