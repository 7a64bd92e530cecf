"""Another target and another actor's loss for a shipped algorithm: ReBRAC, TD3 that stays near recorded actions.

Tarasov et al., 2023, https://arxiv.org/abs/2305.09836. The target and the actor's loss each have a penalty:

    y = r + gamma (min Q'(s', a~) - critic_bc |a~ - a'|^2),     loss = actor_bc |pi(s) - a|^2 - Q(s, pi(s)) / mean |Q|

a' is the recorded action of the next time step. An episode's last time step has none, so its penalty is 0. In the
actor's loss, Q is the first critic, as in TD3; in the paper it is the minimum of both.

alfish train --gin_file=examples/rebrac_pendulum.gin --root_dir=runs/rebrac
"""

import gin
import torch

from alfish import StepType
from alfish.algorithms.td3 import TD3


@gin.configurable
class ReBRAC(TD3):
    """Takes an action of one Box. Settings of TD3 are bound as `TD3.gamma`."""

    weighted_losses = None  # weights of prioritized replay multiply the losses of all groups

    def __init__(self, observation_spec, action_spec, reward_spec, actor_bc=0.01, critic_bc=0.01):
        super().__init__(observation_spec, action_spec, reward_spec)
        self._actor_bc, self._critic_bc = actor_bc, critic_bc

    def next_value(self, features, experience):  # [L-1, N], without gradient
        action = self.target_action(features.next_actor)
        q = self.values.least(self.target_critic(features.next_critic, action))
        distance = (action - experience.action[1:]).square().sum(-1)
        acts = experience.time_step.step_type[1:] != StepType.LAST
        return q - self._critic_bc * torch.where(acts, distance, 0.0)

    def actor_loss(self, policy_q, policy_action, action):  # [1, N], [1, N, A], [1, N, A] -> [1, N]
        distance = (policy_action - action).square().sum(-1)
        return self._actor_bc * distance - policy_q / policy_q.detach().abs().mean().clamp(min=1e-8)
