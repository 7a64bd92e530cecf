"""Target networks: copies that follow slowly."""

import copy
from typing import Any

import torch
from torch import nn

from alfish.errors import UsageError


class Target(nn.Module):
    """A frozen copy of `online`: every `period` calls of `follow` it moves the share `rate` of the way towards it.

    Parameters move; buffers are copied. The copy's parameters take no gradient.

    Args:
      online: what to follow; its forward pass is `self.network`.
      rate: in (0, 1]; 1 copies.
      period: in updates.
    """

    def __init__(self, online: nn.Module, rate: float = 1.0, period: int = 1):
        super().__init__()
        if not 0 < rate <= 1 or period < 1:
            raise UsageError(f"a target network needs a rate in (0, 1] and a period of 1 or more, got {rate}, {period}")
        self.network: Any = copy.deepcopy(online).requires_grad_(False)
        self._rate, self._period = rate, period
        self._num_calls = 0

    def forward(self, *arguments: Any) -> Any:
        return self.network(*arguments)

    @torch.no_grad()
    def follow(self, online: nn.Module) -> None:
        self._num_calls += 1
        if self._num_calls % self._period:
            return
        mine: list[torch.Tensor] = list(self.network.parameters())
        theirs: list[torch.Tensor] = list(online.parameters())
        if self._rate == 1:
            torch._foreach_copy_(mine, theirs)
        else:
            torch._foreach_lerp_(mine, theirs, self._rate)
        for buffer, other in zip(self.network.buffers(), online.buffers()):
            buffer.copy_(other)

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self._num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self._num_calls = state["num_calls"]
