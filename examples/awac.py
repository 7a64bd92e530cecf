"""A variant of a shipped algorithm: AWAC as a subclass of IQL, from recorded data, then with steps of its own.

Nair et al., 2020, https://arxiv.org/abs/2006.09359. The value of a state is that of the policy's own actions, where IQL
has an expectile over recorded actions.
"""

import gin
import torch

from alfish.algorithms.iql import IQL


@gin.configurable
class AWAC(IQL):
    """Takes actions of one Box. Settings of IQL are bound as `IQL.beta`, its own as `AWAC.num_samples`."""

    def __init__(self, observation_spec, action_spec, reward_spec, num_samples=4):
        super().__init__(observation_spec, action_spec, reward_spec)
        self.value.requires_grad_(False)  # IQL's network of state values is not used
        self._num_samples = num_samples

    def parameter_groups(self):
        return {name: parameters for name, parameters in super().parameter_groups().items() if name != "value"}

    @torch.no_grad()  # the policy learns from recorded actions only
    def state_value(self, time_step, state):
        policy, critic = self.policy(time_step), self.target_critic.network
        actions = [policy.sample().clamp(-1, 1) for _ in range(self._num_samples)]
        values = [self.values.least(self.action_values(critic, time_step, action)) for action in actions]
        return torch.stack(values).mean(0)

    def calc_loss(self, experience, info):
        loss_info = super().calc_loss(experience, info)
        losses = {name: loss for name, loss in loss_info.loss.items() if name != "value"}
        return loss_info._replace(loss=losses)
