"""An off-policy algorithm of your own: a critic and an actor with a loss each, and target networks of both.

DDPG without its options: Lillicrap et al., 2016, https://arxiv.org/abs/1509.02971.

alfish train --gin_file=examples/small_ddpg_pendulum.gin --root_dir=runs/small_ddpg
"""

from typing import NamedTuple

import gin
import torch
from torch import nn

from alfish import AlgStep, LossInfo, RLAlgorithm
from alfish.networks import MLP, DeterministicActor, TargetNetwork


class Critic(nn.Module):
    def __init__(self, observation_size, action_size):
        super().__init__()
        self.mlp = MLP(observation_size + action_size)
        self.linear = nn.Linear(self.mlp.output_size, 1)

    def forward(self, observation, action):  # [..., O], [..., A] -> [...]
        return self.linear(self.mlp(torch.cat([observation, action], -1))).squeeze(-1)


class Train(NamedTuple):
    q: torch.Tensor  # [1, N] value of the recorded action
    target: torch.Tensor  # [1, N]
    policy_q: torch.Tensor  # [1, N] value of the actor's action


@gin.configurable
class SmallDDPG(RLAlgorithm):
    on_policy = False  # trains on windows of replay

    def __init__(self, observation_spec, action_spec, reward_spec, gamma=0.99, target_rate=0.005, noise_std=0.1):
        super().__init__(observation_spec, action_spec, reward_spec)
        (observation_size,), (action_size,) = observation_spec.shape, action_spec.shape
        self.actor = DeterministicActor(observation_spec, action_size)
        self.critic = Critic(observation_size, action_size)
        self.target_actor = TargetNetwork(self.actor, target_rate)
        self.target_critic = TargetNetwork(self.critic, target_rate)
        self._gamma, self._noise_std = gamma, noise_std

    def parameter_groups(self):  # each loss trains the parameters of its own group only
        return {"critic": self.critic.parameters(), "actor": self.actor.parameters()}

    def rollout_step(self, time_step, state):  # [B]; actions are in [-1, 1], whatever the environment's bounds are
        action = self.actor(time_step.observation)
        return AlgStep((action + self._noise_std * torch.randn_like(action)).clamp(-1, 1))

    def predict_step(self, time_step, state):
        return AlgStep(self.actor(time_step.observation))

    def train_step(self, experience, state):  # windows [2, N]: a time step and the next one
        step = experience.time_step
        now, later = step.observation[:-1], step.observation[1:]
        with torch.no_grad():
            next_value = self.target_critic(later, self.target_actor(later))
            target = step.reward[1:] + self._gamma * step.discount[1:] * next_value
        q, policy_q = self.critic(now, experience.action[:-1]), self.critic(now, self.actor(now))
        return AlgStep(info=Train(q, target, policy_q))

    def calc_loss(self, experience, info):  # one loss per row and group; the learner masks and averages
        loss = {"critic": (info.q - info.target) ** 2, "actor": -info.policy_q}
        return LossInfo(loss, extra={"q": info.q})

    def after_update(self):  # after each step of the optimizers
        self.target_actor.update(self.actor)
        self.target_critic.update(self.critic)
