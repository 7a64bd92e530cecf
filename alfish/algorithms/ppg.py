"""Phasic policy gradient: PPO, and in an auxiliary phase the distillation of values into the policy's features.

Cobbe et al., 2021, https://arxiv.org/abs/2009.04416, algorithm 1. Policy and value have separate networks. The policy's
network has a second, auxiliary value head.

    policy phase     PPO's loss, on each of N_pi unrolls
    auxiliary phase  (V_aux(s) - G)^2 / 2 + clone_coef KL[pi_old(. | s), pi(. | s)] + (V(s) - G)^2 / 2, on all N_pi

pi_old is the policy at the beginning of the auxiliary phase, and G the target of the value. The auxiliary loss trains
the policy's torso, which thereby learns from values without a conflict with the policy's gradient, and the KL keeps the
policy as it is. `PhasicBatches` keep the unrolls and say when a phase is due.

Differences from the paper: G is computed again when an auxiliary phase begins, with the values of that time, and not
kept from the policy phase; both phases share the state of Adam and the learning rate; one minibatch of the policy phase
trains policy and value, with the same number of epochs; an unroll has PPO's minibatches. With memory, sequences begin
with the states that the policy had when it acted.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish.algorithms.ppo import PPO
from alfish.data import Experience, LossInfo
from alfish.errors import UsageError
from alfish.functional import losses
from alfish.functional.distributions import Distribution
from alfish.nest import Nest
from alfish.networks import PolicyValue
from alfish.networks.layers import orthogonal
from alfish.parameters import NonNegativeFloat, checked


class AuxiliaryTarget(NamedTuple):
    """Inputs of the auxiliary loss: T rows, or T + 1 rows of which `PhasicBatches` cut off the last."""

    target: torch.Tensor  # [T, B] target of both values, or [T, B, R] for vector rewards
    policy: Distribution  # [T + 1, B] policy before the phase


@gin.configurable(module="alfish.algorithms")
@checked
class PPG(PPO):
    """Phasic policy gradient; the module's docstring has the paper and the differences from it.

    Takes `PhasicBatches`. The auxiliary head is the parameter group `auxiliary`, which trains in the auxiliary phase
    only.

    Args:
      clone_coef: weight of KL(policy before the auxiliary phase, policy) in nats, the paper's beta_clone.
      ppo_arguments: settings of `PPO`, without target_kl.

    Raises:
      UsageError: the networks share a torso or return no features, or target_kl is set.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        clone_coef: NonNegativeFloat = 1.0,
        **ppo_arguments: Any,
    ):
        super().__init__(observation_spec, action_spec, reward_spec, **ppo_arguments)
        if self.measures_kl:
            raise UsageError(
                "PPG.target_kl would end an iteration, and with it the auxiliary phase; leave it out, and lower the "
                "number of epochs"
            )
        torso = getattr(self.network, "actor_torso", None)
        if torso is None or getattr(self.network, "critic_torso", None) is None:
            raise UsageError(
                "PPG trains a value head on the policy's torso, and a value with a torso of its own, but "
                f"{type(self.network).__name__} does not have an actor_torso and a critic_torso; set "
                "ActorCritic.shared_torso = False, or give your networks both"
            )
        self.unroll_use = self.unroll_use._replace(has_auxiliary_phase=True)
        self._clone_coef = clone_coef
        num_values = reward_spec.shape[0] if reward_spec.shape else 1
        self.auxiliary_head = orthogonal(nn.Linear(torso.output_size, num_values), 1.0)

    def parameter_groups(self) -> dict[str, Iterable[nn.Parameter]]:
        own = set(self.auxiliary_head.parameters())
        others = [parameter for parameter in self.parameters() if parameter not in own]
        return {"all": others, "auxiliary": list(self.auxiliary_head.parameters())}

    def graph_key(self) -> str:
        """Returns a constant, which tells the learner that not every update trains every group."""
        return "phases"

    def preprocess_auxiliary(self, experience: Experience) -> Experience:
        """Returns an unroll of the auxiliary phase with the targets and the policy before the phase as its info."""
        advantage, value = self.advantage_and_value(experience)
        before, _ = self.network(experience.time_step, experience.state)
        return experience._replace(info=AuxiliaryTarget(advantage + value[:-1], before.policy))

    def calc_loss(self, experience: Experience, info: PolicyValue) -> LossInfo:
        if self.measures_kl:  # set by the learner
            raise UsageError(
                "a learning rate that follows the KL would grow without limit in PPG's auxiliary phase, where the "
                "policy hardly changes; set a number or a schedule"
            )
        if isinstance(experience.info, AuxiliaryTarget):
            return self.auxiliary_loss(experience.info, info)
        result = super().calc_loss(experience, info)
        assert isinstance(result.loss, torch.Tensor)  # PPO has one group
        return result._replace(loss={"all": result.loss})

    def auxiliary_loss(self, stored: AuxiliaryTarget, info: PolicyValue) -> LossInfo:
        """Returns the losses `[T, N]` of the auxiliary phase."""
        before: Any = stored.policy  # of the type of `info.policy`
        value = self.auxiliary_head(info.features)
        value = value if self.reward_spec.shape else value.squeeze(-1)
        auxiliary = self.values.total(losses.half_squared(value - stored.target))
        value_loss = self.values.total(losses.half_squared(info.value - stored.target))
        kl = before.kl(info.policy)
        return LossInfo(
            {"all": auxiliary + self._clone_coef * kl + value_loss, "auxiliary": auxiliary},
            extra={"auxiliary_loss": auxiliary, "auxiliary_value_loss": value_loss, "auxiliary_kl": kl},
        )
