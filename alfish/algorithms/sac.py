"""Soft actor-critic with automatic temperature: off-policy, for Box and Discrete actions.

Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905; Discrete: Christodoulou, 2019, https://arxiv.org/abs/1910.07207.

The action is any nest of Box leaves with at most one Discrete leaf. Box leaves are an input of the critics, the
Discrete one is their outputs, over which expectations are exact. Each kind has its own temperature. REDQ (Chen et al.,
2021), DroQ and RLPD are settings: the size of the ensemble, the subset that targets take the minimum of, layer norm,
dropout.

With memory, the critics' loss trains it, the actor stands on the same features without moving them, and every row of a
window trains (recurrent SAC: Ni et al., 2022, https://arxiv.org/abs/2110.05038, where the actor has its own).

Retrace, of the soft values: Munos et al., 2016, https://arxiv.org/abs/1606.02647. Lower bounds: He et al., 2017,
https://arxiv.org/abs/1611.01606.

Differs from the paper: a truncated episode is bootstrapped from its true final observation; the temperature's loss is
linear in log alpha; with windows of more than two rows, the entropies between are left out of n-step returns, though
not out of Retrace's.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import corrections, losses, nest, returns, specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.distributions import Categorical, SquashedNormal, sum_of
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import MLP, CriticEnsemble, Encoder, SquashedNormalHead, TargetNetwork, burn_in_state
from alfish.networks.heads import categorical_head
from alfish.parameters import FiniteFloat, PositiveFloat, PositiveInt, Rate, UnitInterval, checked


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


class Parts(NamedTuple):
    """An action in its two parts; None where the space has no such leaf."""

    box: torch.Tensor | None  # [..., A] of all Box leaves
    discrete: torch.Tensor | None  # [...] int64


class SACPolicy(NamedTuple):
    """The distributions of an action's parts; None where the space has no such leaf."""

    box: SquashedNormal | None
    discrete: Categorical | None

    def sample(self) -> Parts:
        return Parts(self.box and self.box.sample(), self.discrete and self.discrete.sample())

    def mode(self) -> Parts:
        return Parts(self.box and self.box.mode(), self.discrete and self.discrete.mode())

    def log_prob(self, action: Parts) -> torch.Tensor:
        """`[...]` of both parts together."""
        both = (self.box, action.box), (self.discrete, action.discrete)
        return sum_of(part.log_prob(leaf) for part, leaf in both if part is not None and leaf is not None)

    def choose(self) -> Choice:
        log_p = None if self.discrete is None else self.discrete.log_p
        if self.box is not None:
            return Choice(*self.box.sample_with_log_prob(), log_p)
        assert log_p is not None
        return Choice(None, torch.zeros_like(log_p[..., 0]), log_p)


class SACRollout(NamedTuple):
    """What Retrace must know of how an action came about."""

    log_prob: torch.Tensor  # [B] of the sample, all leaves together
    action: Nest  # the sample; where another one was executed (at random, by hand), log_prob says nothing of that


class SACTrain(NamedTuple):
    """T' is 1, row 0 alone; with memory L - 1, all rows but the last."""

    q: torch.Tensor  # [E, T', N] of the taken action
    next_value: torch.Tensor  # [L, N] soft values of later rows; row 0 is not read
    expected_q: torch.Tensor  # [T', N] of the policy's present choice
    entropies: dict[str, torch.Tensor]  # [T', N] of that choice
    # For Retrace [L, N], else None: what later rows' actions are worth, and their min(1, pi / mu).
    next_q: torch.Tensor | None = None
    trace: torch.Tensor | None = None


@gin.configurable(module="alfish.algorithms")
@checked
class SAC(RLAlgorithm):
    """Soft actor-critic; papers, and how it differs from them, are in the module's docstring.

    Args:
      actor_encoder: takes the observation spec; with memory it is not built.
      actor_mlp: takes the encoder's output size, or that of the critics' features.
      critic: takes (observation_spec, action_size, num_outputs), and `memory` if there is one; has an `ensemble_size`.
      memory: of critics and actor, takes the critics' encoder's output size (`@GRU`, `@LSTM`); None: without.
      gamma: discount per environment step.
      lambda_: of the return, within the window; 1 reaches to its end, 0 is one step. None: 0 with memory and without
        Retrace, else 1.
      target_rate, target_period: how the target critics follow.
      target_subset: how many critics, drawn at random for each update, targets take the minimum of; None: all.
      actor_uses_mean: the actor maximises the critics' mean (REDQ) in place of their minimum.
      initial_alpha: temperatures at the start.
      learn_alpha: whether temperatures are learned; they stay as they are otherwise.
      box_target_entropy: in nats; None: minus the number of Box entries.
      discrete_target_entropy: in nats; None: `discrete_entropy_share` of the largest, log n.
      discrete_entropy_share: see above.
      retrace: returns of more than one step are corrected for how the policy has changed since it acted, by the
        probabilities of then. They end at actions that were not its own, or whose log_prob replay says is nan.
      lower_bound: targets are no less than what was earned to the episode's end. Right where environment and rewards
        are deterministic and entropies are not negative; and a truncated episode's return is a lower bound only where
        rewards are not negative.
    """

    on_policy = False
    weighted_losses = ("critic",)

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        actor_encoder: Callable[[Nest], Any] = Encoder,
        actor_mlp: Callable[[int], Any] = MLP,
        critic: Callable[..., Any] = CriticEnsemble,
        memory: Callable[[int], Any] | None = None,
        gamma: UnitInterval = 0.99,
        lambda_: UnitInterval | None = None,
        target_rate: Rate = 0.005,
        target_period: PositiveInt = 1,
        target_subset: PositiveInt | None = None,
        actor_uses_mean: bool = False,
        initial_alpha: PositiveFloat = 1.0,
        learn_alpha: bool = True,
        box_target_entropy: FiniteFloat | None = None,
        discrete_target_entropy: FiniteFloat | None = None,
        discrete_entropy_share: UnitInterval = 0.5,
        retrace: bool = False,
        lower_bound: bool = False,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        leaves = nest.leaves(action_spec)
        self._box_sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, spaces.Box)]
        self._num_choices = next((int(leaf.n) for leaf in leaves if isinstance(leaf, spaces.Discrete)), 0)
        box_size = sum(self._box_sizes)

        self.stores_recurrent_state = memory is not None
        self._lambda = float(retrace or not self.stores_recurrent_state) if lambda_ is None else lambda_
        self._retrace = retrace
        if retrace:
            self.replay_info = SACRollout._fields
        if lower_bound:
            self.return_gamma = gamma

        # In this order, so that a seed goes on meaning the weights that it meant.
        sizes = box_size, max(1, self._num_choices)
        if memory is None:
            self.actor_encoder: Any = actor_encoder(observation_spec)
            actor_input_size = self.actor_encoder.output_size
        else:
            self.actor_encoder = None
            self.critic: Any = critic(observation_spec, *sizes, memory=memory)
            actor_input_size = self.critic.feature_size
        self.actor_mlp = actor_mlp(actor_input_size)
        self.box_head = SquashedNormalHead(self.actor_mlp.output_size, box_size) if box_size else None
        self.discrete_head = (
            categorical_head(self.actor_mlp.output_size, self._num_choices) if self._num_choices else None
        )
        if memory is None:
            self.critic = critic(observation_spec, *sizes)
        size = self.critic.ensemble_size
        if target_subset is not None and target_subset > size:
            raise UsageError(f"SAC.target_subset is {target_subset}; it is at most the {size} critics")
        self.target_critic = TargetNetwork(self.critic, target_rate, target_period)

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
        for name, leaf in nest.named_leaves(action_spec, "action"):
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
        specs.check_scalar_reward(cls.__name__, reward_spec)

    def parameter_groups(self) -> dict:
        actor = [self.actor_encoder, self.actor_mlp, self.box_head, self.discrete_head]
        return {
            "critic": self.critic.parameters(),
            "actor": [p for module in actor if module is not None for p in module.parameters()],
            "alpha": self.log_alpha.parameters(),
        }

    def initial_state(self, batch_size: int) -> Nest:
        return self.critic.initial_state(batch_size)

    def rollout_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self._actor_features(time_step, state)
        policy = self._policy(features)
        sample = policy.sample()
        action = self._joined(sample)
        return AlgStep(action, state, SACRollout(policy.log_prob(sample), action) if self._retrace else None)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self._actor_features(time_step, state)
        return AlgStep(self._joined(self._policy(features).mode()), state)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        step, burn_in, target = experience.time_step, experience.burn_in, self.target_critic.network
        if self.stores_recurrent_state:  # both memories run over the whole window, each from the stored state
            features, _ = self.critic.features(step, burn_in_state(self.critic.features, burn_in, state))
            now, actor_now, actor_later = features[:-1], features[:-1].detach(), features[1:].detach()
            with torch.no_grad():
                target_later = target.features(step, burn_in_state(target.features, burn_in, state))[0][1:]
        else:
            here, after = nest.split(step, 1)
            now, _ = self.critic.features(here, state)
            actor_now, _ = self._actor_features(here, state)
            with torch.no_grad():
                actor_later, _ = self._actor_features(after, state)
                target_later, _ = target.features(after, state)
        action = self._parts(nest.at(experience.action, slice(0, now.shape[0])))
        q = _of_choice(self.critic(now, action.box), action.discrete)  # [E, T', N]
        next_q = trace = None
        with torch.no_grad():
            policy = self._policy(actor_later)
            choice = policy.choose()
            target_q = self.target_critic(target_later, choice.box)
            if self._retrace:
                taken = self._parts(nest.at(experience.action, slice(1, None)))
                target_q, taken_q = self._smallest(target_q, self.target_critic(target_later, taken.box))
                next_q = returns.from_row_1(_of_choice(taken_q, taken.discrete))
                trace = returns.from_row_1(self._trace(policy, taken, experience))
            else:
                (target_q,) = self._smallest(target_q)
            next_value = self._expect(target_q, choice)
            for kind, entropy in choice.entropies().items():
                next_value = next_value + self.log_alpha[kind].exp() * entropy
            next_value = returns.from_row_1(next_value)
        choice = self._policy(actor_now).choose()
        # With memory, without the graph of the rows: the actor's loss moves the actor alone.
        all_q = self.critic(now.detach() if self.stores_recurrent_state else now, choice.box)
        expected_q = self._expect(all_q.mean(0) if self._actor_uses_mean else all_q.amin(0), choice)
        return AlgStep(state=state, info=SACTrain(q, next_value, expected_q, choice.entropies(), next_q, trace))

    def calc_loss(self, experience: Experience, info: SACTrain) -> LossInfo:
        step = experience.time_step  # [L, N]
        discount = self._gamma * step.discount
        if info.next_q is None or info.trace is None:
            target = returns.lambda_return(step.reward, discount, info.next_value, step.step_type, self._lambda)
        else:
            rows = step.reward, discount, info.next_q, info.next_value, step.step_type, info.trace
            target = corrections.retrace(*rows, self._lambda)
        if self.return_gamma is not None:
            target = corrections.bounded_below(target, experience.return_to_go)
        error = target[: info.expected_q.shape[0]] - info.q  # [E, T', N]
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
        return LossInfo(loss, extra=extra, priority=extra["td_error"])

    def after_update(self) -> None:
        self.target_critic.update(self.critic)

    def _actor_features(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """What the actor sees, and the state carried on."""
        if self.stores_recurrent_state:
            return self.critic.features(time_step, state)
        return self.actor_encoder(time_step.observation), state

    def _policy(self, features: torch.Tensor) -> SACPolicy:
        features = self.actor_mlp(features)
        box = None if self.box_head is None else self.box_head(features)
        return SACPolicy(box, None if self.discrete_head is None else self.discrete_head(features))

    def _smallest(self, *q: torch.Tensor) -> list[torch.Tensor]:
        """Of each, the minimum over the critics, or over a random subset of them that is the same for all."""
        if self._target_subset is not None:
            members = torch.randperm(len(q[0]), device=q[0].device)[: self._target_subset]
            return [each[members].amin(0) for each in q]
        return [each.amin(0) for each in q]

    def _trace(self, policy: SACPolicy, taken: Parts, experience: Experience) -> torch.Tensor:
        """min(1, pi / mu) of the actions of later rows, `[L-1, N]`; 0 where mu is not known."""
        if experience.info is None:
            raise UsageError(
                "SAC.retrace takes the probabilities that actions had when they were taken, and these were recorded "
                "without; set SAC.retrace to False"
            )
        rows = experience.action, experience.info["action"], experience.info["log_prob"]
        action, sample, log_mu = nest.at(rows, slice(1, None))
        known = ~log_mu.isnan()
        for leaf, own in zip(nest.leaves(action), nest.leaves(sample)):
            known = known & (leaf == own if leaf.ndim == known.ndim else (leaf == own).all(-1))
        return torch.where(known, (policy.log_prob(taken) - log_mu).exp().clamp(max=1), 0)

    def _expect(self, q: torch.Tensor, choice: Choice) -> torch.Tensor:
        """`[...]` from `[...]`, or from `[..., n]` over the Discrete leaf."""
        return q if choice.log_p is None else (choice.log_p.exp() * q).sum(-1)

    def _joined(self, action: Parts) -> Nest:
        """The action nest."""
        boxes = iter(() if action.box is None else action.box.split(self._box_sizes, -1))
        return nest.map(lambda leaf: next(boxes) if isinstance(leaf, spaces.Box) else action.discrete, self.action_spec)

    def _parts(self, action: Nest) -> Parts:
        """The inverse of `_joined`."""
        leaves = list(zip(nest.leaves(action), nest.leaves(self.action_spec)))
        boxes = [leaf for leaf, spec in leaves if isinstance(spec, spaces.Box)]
        discrete = [leaf for leaf, spec in leaves if isinstance(spec, spaces.Discrete)]
        return Parts(torch.cat(boxes, -1) if boxes else None, discrete[0] if discrete else None)


def _of_choice(q: torch.Tensor, discrete: torch.Tensor | None) -> torch.Tensor:
    """Of the Discrete action that was taken, `[..., T', N]` from `[..., T', N, n]`; as it is where there is none."""
    if discrete is None:
        return q
    return q.gather(-1, discrete.expand(q.shape[:-1]).unsqueeze(-1)).squeeze(-1)
