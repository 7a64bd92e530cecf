"""Phasic policy gradient: PPO with auxiliary phases, which train the policy's features to predict values.

Cobbe et al., 2021, https://arxiv.org/abs/2009.04416, algorithm 1. Policy and value have separate networks. The policy's
network also has an auxiliary value head.

    policy phase     PPO's loss, on each of N_pi unrolls
    auxiliary phase  (V_aux(s) - G)^2 / 2 + clone_coef KL[pi_old(. | s), pi(. | s)] + (V(s) - G)^2 / 2, on all N_pi

pi_old is the policy at the beginning of the auxiliary phase, and G is the value target. The auxiliary loss trains the
policy's torso to predict values, separately from the policy gradient. The KL keeps the policy close to pi_old.
`PhasicBatches` stores the unrolls and starts the auxiliary phases.

Differences from the paper: at the beginning of an auxiliary phase, G is computed again with the current values, not
kept from the policy phase; both phases share the state of Adam and the learning rate; in the policy phase, policy and
value train on the same minibatches for the same number of epochs; the size of minibatches is PPO's. With memory, each
sequence begins with the recurrent state that was stored when the policy acted.
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
    """Inputs of the auxiliary loss. From fields of T + 1 rows, `PhasicBatches` removes the last row."""

    target: torch.Tensor  # [T, B] target of both value heads, or [T, B, R] for vector rewards
    policy: Distribution  # [T + 1, B] policy at the beginning of the phase


@gin.configurable(module="alfish.algorithms")
@checked
class PPG(PPO):
    """Phasic policy gradient; see the module's docstring for the losses and the differences from the paper.

    Requires `Trainer.batches = @PhasicBatches`. The auxiliary value head is the parameter group `auxiliary`, which
    trains in auxiliary phases only.

    Args:
      clone_coef: weight of KL(policy at the beginning of the auxiliary phase, policy) in nats, the paper's beta_clone.
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
                "PPG.target_kl would end an iteration, and with it the auxiliary phase; leave target_kl out, and lower "
                "the number of epochs"
            )
        torso = getattr(self.network, "actor_torso", None)
        if torso is None or getattr(self.network, "critic_torso", None) is None:
            raise UsageError(
                f"PPG needs separate torsos for the policy and the value, but {type(self.network).__name__} does not "
                "have an actor_torso and a critic_torso; set ActorCritic.shared_torso = False, or define both torsos "
                "in your networks"
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
        """Returns a constant; without a key, every update would have to train every group."""
        return "phases"

    def preprocess_auxiliary(self, experience: Experience) -> Experience:
        """Returns an unroll whose info is the `AuxiliaryTarget` of the phase."""
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
        before: Any = stored.policy  # has the type of `info.policy`
        value = self.auxiliary_head(info.features)
        value = value if self.reward_spec.shape else value.squeeze(-1)
        auxiliary = self.values.total(losses.half_squared(value - stored.target))
        value_loss = self.values.total(losses.half_squared(info.value - stored.target))
        kl = before.kl(info.policy)
        return LossInfo(
            {"all": auxiliary + self._clone_coef * kl + value_loss, "auxiliary": auxiliary},
            extra={"auxiliary_loss": auxiliary, "auxiliary_value_loss": value_loss, "auxiliary_kl": kl},
        )
