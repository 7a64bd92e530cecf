"""PPO that learns the weight of the entropy bonus, such that the policy's entropy stays at a target.

    policy:       PPO's loss - alpha H[pi(. | s)]
    temperature:  log alpha (H[pi(. | s)] - target),    differentiated for log alpha only

The temperature alpha falls while the entropy is above the target, and rises while it is below. After each update, alpha
is clipped to a range, so that it can change back within few updates. Habitat's PPO has the same Lagrangian with a loss
that is linear in alpha; here the loss is linear in log alpha, as in SAC.
"""

import math
from collections.abc import Iterable
from typing import Any

import gin
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.algorithms.ppo import PPO
from alfish.data import Experience, LossInfo
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import PolicyValue
from alfish.parameters import FiniteFloat, PositiveFloat, checked


@gin.configurable(module="alfish.algorithms")
@checked
class EntropyTargetPPO(PPO):
    """PPO that keeps the policy's mean entropy at a target; see the module's docstring for the losses.

    The temperature is the parameter group `temperature`, which may have its own learning rate:
    `Learner.learning_rate = {'all': 3e-4, 'temperature': 1e-2}`.

    Args:
      entropy_target: target of the policy's mean entropy in nats, summed over the leaves of the action. None means half
        of the maximum for each discrete choice, and -1 for each entry of a Box with bounds -1 and 1.
      initial_temperature: temperature at the start of training.
      lowest_temperature: smallest temperature.
      highest_temperature: largest temperature, relative to normalized advantages, whose standard deviation is 1.
      ppo_arguments: settings of `PPO`; entropy_coef is a second weight of the entropy, which is added and not learned.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_spec: Nest,
        reward_spec: spaces.Box,
        *,
        entropy_target: FiniteFloat | None = None,
        initial_temperature: PositiveFloat = 0.01,
        lowest_temperature: PositiveFloat = 1e-4,
        highest_temperature: PositiveFloat = 1.0,
        **ppo_arguments: Any,
    ):
        if not lowest_temperature <= initial_temperature <= highest_temperature:
            raise UsageError(
                f"EntropyTargetPPO.initial_temperature is {initial_temperature}, outside of [{lowest_temperature}, "
                f"{highest_temperature}]; move it into the range, or change lowest_temperature or "
                "highest_temperature"
            )
        super().__init__(observation_spec, action_spec, reward_spec, **ppo_arguments)
        self._target = default_target(action_spec) if entropy_target is None else entropy_target
        self._range = math.log(lowest_temperature), math.log(highest_temperature)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(initial_temperature)))

    def parameter_groups(self) -> dict[str, Iterable[nn.Parameter]]:
        others = [parameter for parameter in self.parameters() if parameter is not self.log_temperature]
        return {"all": others, "temperature": [self.log_temperature]}

    def calc_loss(self, experience: Experience, info: PolicyValue) -> LossInfo:
        result = super().calc_loss(experience, info)
        entropy, extra = info.policy.entropy(), dict(result.extra or {})
        temperature, others = self.log_temperature.exp().detach(), result.loss
        assert isinstance(others, torch.Tensor)  # PPO has one group, so its loss is a tensor
        loss = {
            "all": others - temperature * entropy,
            "temperature": self.log_temperature * (entropy.detach() - self._target),
        }
        return result._replace(loss=loss, extra={**extra, "temperature": temperature})

    def after_update(self) -> None:
        super().after_update()
        self.log_temperature.clamp_(*self._range)


def default_target(action_spec: Nest) -> float:
    """Returns half of the maximal entropy of all discrete choices, minus the number of Box entries, in nats."""
    target = 0.0
    for leaf in nest.leaves(action_spec):
        if isinstance(leaf, spaces.Box):
            target -= math.prod(leaf.shape)
        elif isinstance(leaf, spaces.Discrete):
            target += 0.5 * math.log(leaf.n)
        elif isinstance(leaf, spaces.MultiDiscrete):
            target += 0.5 * sum(math.log(n) for n in leaf.nvec)
        else:
            target += 0.5 * math.log(2) * math.prod(leaf.shape)
    return target
