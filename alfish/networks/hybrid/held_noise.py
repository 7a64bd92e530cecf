"""Exploration noise that is kept for several steps."""

from typing import TypedDict

import gin
import torch
from torch import nn

from alfish.networks.hybrid.policy import HybridAction, HybridPolicy
from alfish.parameters import NonNegativeFloat, PositiveInt, checked


class Held(TypedDict):
    """Noise of each environment, and the number of further steps that it is kept for."""

    noise: torch.Tensor  # [B, A]
    left: torch.Tensor  # [B] int64


@gin.configurable(module="alfish.networks", denylist=["size"])
@checked
class HeldNoise(nn.Module):
    """Noise of a squashed normal that stays the same for n steps: a = tanh(mean + std eps), P(n) ~ n^-exponent.

    Each environment has noise and a length of its own. An episode begins with new noise. The action still follows the
    observation, by mean and standard deviation.

    Args:
      size: A, entries of the noise.
      longest: largest n.
      exponent: of the lengths' distribution; 0: all lengths are equally likely.

    Source: Kim et al., 2026, https://arxiv.org/abs/2604.04539. There all environments share one length, and episodes
    begin with the noise of the last one.
    """

    bounds: torch.Tensor

    def __init__(self, size: PositiveInt, longest: PositiveInt = 16, exponent: NonNegativeFloat = 2.0):
        super().__init__()
        self._size = size
        weights = torch.arange(1, longest + 1, dtype=torch.float64) ** -exponent
        bounds = (weights.cumsum(0) / weights.sum())[:-1]  # P(n <= k) for k < longest
        self.register_buffer("bounds", bounds.float(), persistent=False)

    def initial_state(self, batch_size: int) -> Held:
        """Returns the state before an episode, in which the next step draws."""
        return {"noise": torch.zeros(batch_size, self._size), "left": torch.zeros(batch_size, dtype=torch.int64)}

    def sample(self, policy: HybridPolicy, state: Held) -> tuple[HybridAction, Held]:
        """Returns actions, and the next state. It draws as many random numbers whether noise is kept or not."""
        assert policy.box is not None
        mean, log_std = policy.box
        fresh, draw = torch.randn_like(mean), torch.rand_like(mean[:, :1])
        length = 1 + (draw >= self.bounds).sum(-1)
        is_new = state["left"] == 0
        noise = torch.where(is_new.unsqueeze(-1), fresh, state["noise"])
        left = torch.where(is_new, length, state["left"]) - 1
        box = torch.tanh(mean + log_std.exp() * noise)
        return HybridAction(box, policy.discrete and policy.discrete.sample()), {"noise": noise, "left": left}
