"""One more loss for a shipped algorithm: PPO whose features must also tell the observation.

alfish train --gin_file=examples/reconstruction_cartpole.gin --root_dir=runs/reconstruction
"""

import gin
from gymnasium import spaces
from torch import nn

from alfish.algorithms.ppo import PPO


@gin.configurable
class ReconstructingPPO(PPO):
    """Takes observations of one Box. Settings of PPO are bound as `PPO.gamma`."""

    def __init__(self, observation_spec, action_spec, reward_spec, reconstruction_coef=0.1):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.decoder = nn.Linear(self.network.actor_torso.output_size, spaces.flatdim(observation_spec))
        self._reconstruction_coef = reconstruction_coef

    def calc_loss(self, experience, info):  # [T, N]
        loss_info = super().calc_loss(experience, info)
        observation = experience.time_step.observation.flatten(2)
        error = (self.decoder(info.features) - observation).square().mean(-1)
        extra = {**loss_info.extra, "reconstruction_error": error}
        return loss_info._replace(loss=loss_info.loss + self._reconstruction_coef * error, extra=extra)
