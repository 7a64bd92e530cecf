"""The previous action and its reward as parts of the observation."""

from typing import Any

import gin
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from alfish import nest
from alfish.data import StepType, TimeStep
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks import Flat, OneHot
from alfish.parameters import checked
from alfish.transforms.transform import Transform


@gin.configurable(module="alfish.transforms")
@checked
class PreviousStep(Transform):
    """Adds the leaves `prev_action` and `prev_reward` to the observation; both are 0 at FIRST rows.

    An observation that is not a dict becomes the leaf `observation` of a dict. `prev_action` `[A']` is the executed
    action in the algorithm's units, with all its leaves side by side and one-hot codes of Discrete and MultiDiscrete
    entries. `prev_reward` `[1]` or `[R]` is the reward as earlier transforms in the chain have changed it; for example,
    it is normalized after a `RewardNormalizer`.

    Args:
      observation_spec, reward_spec: specs of the input rows.
      action_spec: canonical action nest.
      action, reward: whether to add `prev_action` and `prev_reward`.

    Raises:
      UsageError: the observation already has a leaf of this name, or `action` and `reward` are both False.
    """

    def __init__(
        self,
        observation_spec: Nest,
        reward_spec: spaces.Box,
        action_spec: Nest,
        action: bool = True,
        reward: bool = True,
    ):
        super().__init__(observation_spec, reward_spec)
        if not action and not reward:
            raise UsageError("PreviousStep.action and PreviousStep.reward are both False; leave the transform out")
        self._is_dict = isinstance(observation_spec, dict)
        self._adds_action, self._adds_reward = action, reward
        self.shows_rewards = reward
        codes: list[Any] = [_code(leaf) for leaf in nest.leaves(action_spec)]
        self._codes: Any = nn.ModuleList(codes)
        added = {"prev_action": sum(code.output_size for code in codes)} if action else {}
        added |= {"prev_reward": int(np.prod(reward_spec.shape))} if reward else {}
        taken = sorted(set(added) & set(observation_spec)) if self._is_dict else []
        if taken:
            raise UsageError(
                f"PreviousStep adds the leaf {taken[0]!r}, but the observation already has a leaf of this name; rename "
                "that leaf"
            )
        self.observation_spec = self._parts(observation_spec) | {
            name: spaces.Box(-np.inf, np.inf, (size,), np.float32) for name, size in added.items()
        }

    def transform(self, time_step: TimeStep, state: Nest) -> TimeStep:
        first = (time_step.step_type == StepType.FIRST).unsqueeze(-1)
        observation = self._parts(time_step.observation)
        if self._adds_action:
            codes = [code(leaf) for code, leaf in zip(self._codes, nest.leaves(time_step.prev_action))]
            observation["prev_action"] = torch.where(first, 0.0, torch.cat(codes, -1))
        if self._adds_reward:
            reward = time_step.reward if self.reward_spec.shape else time_step.reward.unsqueeze(-1)
            observation["prev_reward"] = torch.where(first, 0.0, reward)
        return time_step._replace(observation=observation)

    def _parts(self, observation: Nest) -> dict[str, Nest]:
        return dict(observation) if self._is_dict else {"observation": observation}


def _code(leaf: spaces.Space) -> nn.Module:
    return OneHot(leaf) if isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)) else Flat(leaf)
