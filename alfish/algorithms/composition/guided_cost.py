"""Guided cost learning: the reward is minus a cost that makes the demonstrations most likely.

Finn, Levine & Abbeel, 2016, https://arxiv.org/abs/1603.00448. The cost c(s, a) is the energy of a distribution of steps
with density exp(-c) / Z. The loss is the negative log-likelihood of the demonstrations. Z is estimated by importance
sampling from steps x_j, half from the policy and half from the demonstrations (section 4.2 and equation 7):

    loss = mean c(demonstrations) + log mean_j exp(-c(x_j)) / q(x_j),    q = 1/2 pi(a | s) + 1/2 p(a | s)

Here, pi is the policy, and p is a model of the demonstrations' actions, trained by maximum likelihood together with the
cost.

A constant added to c does not change the loss, but it changes the policy: a reward of constant sign favours long or
short episodes. Therefore r = mean c(policy) - c, so that the mean reward of the policy's steps is 0. An average step
then has the reward 0, like each step after the end of an episode.

Differences from the paper: samples are steps instead of trajectories, so q has no product over time, and assumes the
same distribution of states for policy and demonstrations; the cost makes one gradient step in each update of the
algorithm, on the minibatch and an equal number of the expert's steps; any algorithm may train the policy; costs are
bounded; inputs and rewards are normalized; the regularizers of trajectories (section 5.2) are left out. An action
beyond the bounds of a Box has the density of the action at the bounds.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import gin
import torch

from alfish.algorithms.composition.learned_reward import LearnedReward
from alfish.algorithms.composition.part import LogProb, Transitions
from alfish.data import LossInfo
from alfish.functional.distributions import Distribution
from alfish.functional.losses import masked_mean
from alfish.nest import Nest
from alfish.networks import FLOORED_HEAD, MLP, Encoder, head_masks, policy_of
from alfish.offline import OfflineBuffer
from alfish.parameters import FiniteFloat, LayerSize, PositiveFloat, UnitInterval, checked
from alfish.parameters.parts import build_network
from alfish.parameters.schedules import Schedule

NEVER = -1e9  # log weight of a step that is not trainable; -inf would give nan gradients if no step is trainable


@gin.configurable(module="alfish.composition")
@checked
class GuidedCost(LearnedReward):
    """Guided cost learning; see the module's docstring for the paper and the differences from it.

    `Composed.extrinsic_coef = 0` leaves the environment's reward out; metrics and evaluations keep it. The policy needs
    a density of its actions (`RLAlgorithm.log_prob`), and no memory.

    Args:
      observation_spec, action_spec: specs of observations and actions, see `Part`. Observations must have the format of
        the data, so no transform may change them.
      demonstrations: class or factory of the expert's episodes, an `OfflineBuffer`.
      coef: weight of the reward; a number or a schedule of progress.
      encoder: class or factory of two encoders. The encoder of the cost is called with the spec of the normalized
        {'action', 'observation'}; the encoder of the model of actions, with the spec of the normalized observation.
      layers: sizes of the hidden layers of the cost, and of the model of the demonstrations' actions.
      cost_limit: largest absolute cost L, in nats; cost = L tanh(output / L).
      normalize_reward: whether rewards are divided by the standard deviation of their discounted returns.
      gamma: discount per environment step, for the returns of `normalize_reward`.
      clip: largest absolute entry of a normalized input, and of a normalized reward.
    """

    name = "gcl"
    reads_policy = True

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        *,
        demonstrations: Callable[..., OfflineBuffer] = OfflineBuffer,
        coef: FiniteFloat | Schedule = 1.0,
        encoder: Callable[[Nest], Any] = Encoder,
        layers: Sequence[LayerSize] = (32, 32),
        cost_limit: PositiveFloat = 10.0,
        normalize_reward: bool = True,
        gamma: UnitInterval = 0.99,
        clip: PositiveFloat = 10.0,
    ):
        super().__init__(
            observation_spec, action_spec, demonstrations=demonstrations, coef=coef, encoder=encoder,
            normalize_reward=normalize_reward, gamma=gamma, clip=clip,
        )  # fmt: skip
        self._cost_limit = cost_limit
        self.cost_network = self.make_network(layers)
        self.density_encoder: Any = build_network(encoder, "GuidedCost.encoder", self.input_spec["observation"])
        self.density_mlp = MLP(self.density_encoder.output_size, layers=layers, activation="relu", norm=None)
        self.density_head: Any = FLOORED_HEAD(self.density_mlp.output_size, action_spec)
        self._masks = head_masks(self.density_head, observation_spec, action_spec)

    def cost(self, observation: Nest, action: Nest) -> torch.Tensor:
        """Returns the cost `[...]` of steps, in nats."""
        output = self.cost_network(self._features(observation, action)).squeeze(-1)
        return self._cost_limit * torch.tanh(output / self._cost_limit)

    def density(self, observation: Nest, action: Nest) -> Distribution:
        """Returns the model of the demonstrations' actions at observations `[...]`; `action` is not read."""
        seen = self.normalized(observation, action)["observation"]
        return policy_of(self.density_head, self.density_mlp(self.density_encoder(seen)), self._masks, observation)

    def raw_reward(self, observation: Nest, action: Nest, trains: torch.Tensor | None) -> torch.Tensor:
        cost = self.cost(observation, action)
        return (cost.mean() if trains is None else masked_mean(cost, trains)) - cost

    def loss_given_policy(self, transitions: Transitions, log_prob: LogProb) -> LossInfo:
        trains = transitions.trains
        if trains is None:
            trains = torch.ones_like(transitions.next_discount, dtype=torch.bool)
        expert = self.demonstrations(trains.shape)
        costs, log_density, log_q = [], [], []
        for steps in (transitions, expert):
            inputs = steps.observation, steps.action
            costs.append(self.cost(*inputs))
            log_density.append(self.density(*inputs).log_prob(steps.action))
            log_q.append(torch.logaddexp(log_prob(*inputs), log_density[-1].detach()) - math.log(2))
        log_z, effective = estimated_log_z(torch.stack(costs), torch.stack(log_q), trains)
        of_policy, of_expert = costs
        extra = {
            "policy_cost": of_policy,
            "expert_cost": of_expert,
            "log_z": log_z,
            "effective_samples": effective,
            "expert_log_density": log_density[1],
        }
        return LossInfo(of_expert + log_z - log_density[1], extra=extra)


def estimated_log_z(cost: torch.Tensor, log_q: torch.Tensor, trains: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns an importance-sampling estimate of log Z, 0-d, and the effective fraction of samples, 0-d in (0, 1].

        Z = mean_j w_j,   w_j = exp(-c_j) / q_j,   fraction = (sum_j w_j)^2 / (M sum_j w_j^2)   for M samples

    Args:
      cost: costs `[K, ...]` of K samples for each step of the minibatch.
      log_q: log-density `[K, ...]` with which the samples were drawn; it needs no gradient.
      trains: mask of the trainable steps, `[...]` bool; samples of other steps do not count.
    """
    log_weight = torch.where(trains, -cost - log_q, NEVER)
    log_sum = log_weight.flatten().logsumexp(0)
    num_samples = len(cost) * trains.sum().clamp(min=1)
    share = (log_weight.detach() - log_sum.detach()).exp()
    return log_sum - num_samples.log(), 1 / (num_samples * share.square().sum())
