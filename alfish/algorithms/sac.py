"""Soft actor-critic with learned temperatures: off-policy, for Box and Discrete actions.

Haarnoja et al., 2018, https://arxiv.org/abs/1812.05905. Discrete: Christodoulou, 2019, https://arxiv.org/abs/1910.07207.
Memory: Ni et al., 2022, https://arxiv.org/abs/2110.05038. Retrace: Munos et al., 2016, https://arxiv.org/abs/1606.02647.
Lower bounds: He et al., 2017, https://arxiv.org/abs/1611.01606.

The action is a nest of Box leaves and at most one Discrete leaf (`networks.hybrid_policy`). Box entries are inputs of
the critics, which have one output for each Discrete choice. Each of the two kinds has its own temperature. REDQ (Chen
et al., 2021), DroQ and RLPD are settings: ensemble size, target subset, layer norm, dropout.

Row 0 of a window trains; with memory, every row but the last. The critics' loss trains the memory, and the actor takes
the features of the critics without a gradient to them.

Differences from the papers: a truncated episode bootstraps from its true final observation; the temperature's loss is
linear in log alpha; n-step returns without Retrace leave out the entropies of the rows in between; with memory, the
actor has none of its own.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import losses, nest, specs
from alfish.algorithms.rl_algorithm import ReplayNeeds, RLAlgorithm
from alfish.data import AlgStep, Experience, LossInfo, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import MLP, CriticEnsemble, Encoder, HybridHead, HybridPolicy, HybridSpace, TargetNetwork, Window
from alfish.parameters import FiniteFloat, PositiveFloat, PositiveInt, Rate, UnitInterval, checked
from alfish.targets import NextValues, td_target


class SACRollout(NamedTuple):
    """Probability of an action when it was drawn, for Retrace."""

    log_prob: torch.Tensor  # [B] of the sample, all leaves together
    action: Nest  # the sample; log_prob does not hold where another action was executed (random, or by hand)


class SACTrain(NamedTuple):
    """Outputs of the rows that train; T' is 1, or L - 1 with memory."""

    q: torch.Tensor  # [E, T', N] of the taken action
    following: NextValues  # [L-1, N] soft values of rows 1 to L-1, by the target critics
    expected_q: torch.Tensor  # [T', N] of an action of the present policy
    entropies: dict[str, torch.Tensor]  # [T', N] of the present policy


@gin.configurable(module="alfish.algorithms")
@checked
class SAC(RLAlgorithm):
    """Soft actor-critic; the module's docstring has the papers and the differences from them.

    Args:
      actor_encoder: takes the observation spec; not built with memory.
      actor_mlp: takes the encoder's output size; with memory, the size of the critics' features.
      critic: takes (observation_spec, action_size, num_outputs), and `memory` if there is one; has an `ensemble_size`.
      memory: of critics and actor; takes the output size of the critics' encoder (`@GRU`, `@LSTM`). None: no memory.
      gamma: discount per environment step.
      lambda_: of the return within a window; 1 bootstraps at the last row only, 0 is the one-step return. None: 1; with
        memory and without Retrace, 0.
      target_rate, target_period: of the target critics' updates.
      target_subset: number of critics, drawn at random for each update, whose minimum is the target; None: all.
      actor_uses_mean: the actor maximizes the critics' mean (REDQ) instead of their minimum.
      initial_alpha: temperature at the start.
      learn_alpha: whether temperatures are learned.
      box_target_entropy: in nats; None: minus the number of Box entries.
      discrete_target_entropy: in nats; None: `discrete_entropy_fraction` of the maximum, log n.
      discrete_entropy_fraction: in [0, 1].
      retrace: returns of several steps are corrected by min(1, pi / mu). They end at actions that the policy did not
        draw, and where log_prob is nan.
      lower_bound: targets are at least the return to the end of the episode. Correct only in deterministic environments
        with entropies that are not negative and, for truncated episodes, with rewards that are not negative.
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
        discrete_entropy_fraction: UnitInterval = 0.5,
        retrace: bool = False,
        lower_bound: bool = False,
    ):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.action_space = HybridSpace(action_spec)
        self._make_networks(actor_encoder, actor_mlp, critic, memory)
        size = self.critic.ensemble_size
        if target_subset is not None and target_subset > size:
            raise UsageError(f"SAC.target_subset is {target_subset}; it is at most the {size} critics")
        self.target_critic = TargetNetwork(self.critic, target_rate, target_period)
        target_entropies = box_target_entropy, discrete_target_entropy, discrete_entropy_fraction
        self._target_entropy = self.action_space.target_entropies(*target_entropies)
        alphas = {kind: torch.tensor(math.log(initial_alpha)) for kind in self._target_entropy}
        self.log_alpha = nn.ParameterDict({kind: nn.Parameter(alpha, learn_alpha) for kind, alpha in alphas.items()})
        info = SACRollout._fields if retrace else ()
        self.replay_needs = ReplayNeeds(info, gamma if lower_bound else None, memory is not None)
        self._lambda = float(retrace or memory is None) if lambda_ is None else lambda_
        self._gamma, self._target_subset, self._actor_uses_mean = gamma, target_subset, actor_uses_mean
        self._retrace, self._lower_bound = retrace, lower_bound

    def _make_networks(
        self,
        actor_encoder: Callable[[Nest], Any],
        actor_mlp: Callable[[int], Any],
        critic: Callable[..., Any],
        memory: Callable[[int], Any] | None,
    ) -> None:
        """Makes encoder, actor and critics; their order decides which weights a seed gives."""
        sizes = self.action_space.box_size, max(1, self.action_space.num_choices)
        self.actor_encoder: Any = None
        if memory is None:
            self.actor_encoder = actor_encoder(self.observation_spec)
        else:
            self.critic: Any = critic(self.observation_spec, *sizes, memory=memory)
        self.actor_mlp = actor_mlp(self.actor_encoder.output_size if memory is None else self.critic.feature_size)
        self.policy_head = HybridHead(self.actor_mlp.output_size, self.action_space)
        if memory is None:
            self.critic = critic(self.observation_spec, *sizes)

    @classmethod
    def check_specs(cls, observation_spec: Nest, action_spec: Nest, reward_spec: spaces.Box) -> None:
        HybridSpace.check(cls.__name__, action_spec)
        specs.check_scalar_reward(cls.__name__, reward_spec)

    def parameter_groups(self) -> dict:
        actor = [self.actor_encoder, self.actor_mlp, self.policy_head]
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
        action = self.action_space.join(sample)
        return AlgStep(action, state, SACRollout(policy.log_prob(sample), action) if self._retrace else None)

    def predict_step(self, time_step: TimeStep, state: Nest) -> AlgStep:
        features, state = self._actor_features(time_step, state)
        return AlgStep(self.action_space.join(self._policy(features).mode()), state)

    def train_step(self, experience: Experience, state: Nest) -> AlgStep:
        window = Window(experience, self.replay_needs.recurrent_state)
        if self.replay_needs.recurrent_state:  # the actor's loss does not train the critics' features
            features, actor_later = window.both(self.critic.features)
            actor_now = features.detach()
        else:
            features = window.trained(self.critic.features)
            actor_now, actor_later = window.both(self._actor_features)
        taken = self.action_space.split(nest.at(experience.action, slice(0, features.shape[0])))
        q = _of_choice(self.critic(features, taken.box), taken.discrete)  # [E, T', N]
        target_features = window.later(self.target_critic.network.features)
        with torch.no_grad():
            following = self._next_values(experience, actor_later, target_features)
        choice = self._policy(actor_now).choose()
        all_q = self.critic(features.detach(), choice.box)
        expected_q = choice.expectation(all_q.mean(0) if self._actor_uses_mean else all_q.amin(0))
        return AlgStep(info=SACTrain(q, following, expected_q, choice.entropies()))

    def calc_loss(self, experience: Experience, info: SACTrain) -> LossInfo:
        target = td_target(experience, self._gamma, self._lambda, info.following, self._lower_bound)
        error = target[: info.expected_q.shape[0]] - info.q  # [E, T', N]
        td_error = error.abs().mean(0)
        actor_loss = -info.expected_q
        alpha_loss = torch.zeros_like(actor_loss)
        extra = {"q": info.q.mean(0), "td_error": td_error}
        for kind, entropy in info.entropies.items():
            alpha = self.log_alpha[kind].exp().detach()
            actor_loss = actor_loss - alpha * entropy
            excess = (entropy - self._target_entropy[kind]).detach()
            alpha_loss = alpha_loss + self.log_alpha[kind] * excess
            extra |= {f"entropy_{kind}": entropy, f"alpha_{kind}": alpha}
        loss = {"critic": losses.squared(error).sum(0), "actor": actor_loss, "alpha": alpha_loss}
        if not any(p.requires_grad for p in self.log_alpha.values()):
            del loss["alpha"]
        return LossInfo(loss, extra=extra, priority=td_error)

    def after_update(self) -> None:
        self.target_critic.update(self.critic)

    def _actor_features(self, time_step: TimeStep, state: Nest) -> tuple[torch.Tensor, Nest]:
        """Returns the actor's input, and the next state."""
        if self.replay_needs.recurrent_state:
            return self.critic.features(time_step, state)
        return self.actor_encoder(time_step.observation), state

    def _policy(self, features: torch.Tensor) -> HybridPolicy:
        return self.policy_head(self.actor_mlp(features))

    def _next_values(self, experience: Experience, actor_features: torch.Tensor, features: torch.Tensor) -> NextValues:
        """Returns soft values of rows 1 to L-1; for Retrace, also values and traces of the actions taken there.

        Args:
          experience: `[L, N]`.
          actor_features: `[L-1, N, ...]`, the actor's inputs.
          features: `[L-1, N, ...]`, the target critics' inputs.
        """
        policy = self._policy(actor_features)
        choice = policy.choose()
        q, taken_q, trace = self.target_critic(features, choice.box), None, None
        if self._retrace:
            taken = self.action_space.split(nest.at(experience.action, slice(1, None)))
            q, taken_q = self._smallest(q, self.target_critic(features, taken.box))
            taken_q = _of_choice(taken_q, taken.discrete)
            trace = self._trace(policy.log_prob(taken), experience)
        else:
            (q,) = self._smallest(q)
        value = choice.expectation(q)
        for kind, entropy in choice.entropies().items():
            value = value + self.log_alpha[kind].exp() * entropy
        return NextValues(value, taken_q, trace)

    def _smallest(self, *q: torch.Tensor) -> list[torch.Tensor]:
        """Returns the minimum of each over the critics, or over one random subset of them for all."""
        if self._target_subset is not None:
            members = torch.randperm(len(q[0]), device=q[0].device)[: self._target_subset]
            return [each[members].amin(0) for each in q]
        return [each.amin(0) for each in q]

    def _trace(self, log_pi: torch.Tensor, experience: Experience) -> torch.Tensor:
        """Returns min(1, pi / mu) of the actions at rows 1 to L-1, `[L-1, N]`; 0 where mu is unknown."""
        if experience.info is None:
            raise UsageError(
                "SAC.retrace needs the probability of each action when it was drawn, and recorded data have none; set "
                "SAC.retrace to False"
            )
        rows = experience.action, experience.info["action"], experience.info["log_prob"]
        action, sample, log_mu = nest.at(rows, slice(1, None))
        known = ~log_mu.isnan()
        for leaf, own in zip(nest.leaves(action), nest.leaves(sample)):
            known = known & (leaf == own if leaf.ndim == known.ndim else (leaf == own).all(-1))
        return torch.where(known, (log_pi - log_mu).exp().clamp(max=1), 0)


def _of_choice(q: torch.Tensor, discrete: torch.Tensor | None) -> torch.Tensor:
    """Returns the values of the Discrete choice, `[..., T', N]` from `[..., T', N, n]`; `q` itself if it is None."""
    if discrete is None:
        return q
    return q.gather(-1, discrete.expand(q.shape[:-1]).unsqueeze(-1)).squeeze(-1)
