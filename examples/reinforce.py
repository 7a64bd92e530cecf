"""REINFORCE with a learned baseline: a complete algorithm of your own. Williams, 1992.

alfish train --gin_file=examples/reinforce_cartpole.gin --root_dir=runs/reinforce
"""

from typing import NamedTuple

import gin
import torch

from alfish import AlgStep, LossInfo, RLAlgorithm
from alfish.functional import returns
from alfish.functional.losses import huber
from alfish.networks import ActorCritic


class Target(NamedTuple):
    return_: torch.Tensor  # [T, B]
    advantage: torch.Tensor  # [T, B]


@gin.configurable
class Reinforce(RLAlgorithm):
    on_policy = True

    def __init__(self, observation_spec, action_spec, reward_spec, gamma=0.99, baseline_coef=0.5):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.network = ActorCritic(observation_spec, action_spec, reward_spec)
        self._gamma, self._baseline_coef = gamma, baseline_coef

    def initial_state(self, batch_size):  # of a memory, if the network has one
        return self.network.initial_state(batch_size)

    def rollout_step(self, time_step, state):  # [B], no gradient
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.sample(), state)

    def predict_step(self, time_step, state):
        policy, state = self.network.policy(time_step, state)
        return AlgStep(policy.mode(), state)

    def preprocess_experience(self, experience):  # [T+1, B], no gradient
        step = experience.time_step
        value = self.network.value(step, experience.state)
        return_ = returns.discounted_return(step.reward, self._gamma * step.discount, value[1:], step.step_type)
        return experience._replace(info=Target(return_, return_ - value[:-1]))

    def train_step(self, experience, state):  # [T, N], with gradients
        info, _ = self.network(experience.time_step, state)
        return AlgStep(info=info)

    def calc_loss(self, experience, info):  # one loss per row; the learner masks and averages
        policy_loss = -info.policy.log_prob(experience.action) * experience.info.advantage
        baseline_loss = huber(info.value - experience.info.return_)
        return LossInfo(policy_loss + self._baseline_coef * baseline_loss, extra={"baseline_loss": baseline_loss})
