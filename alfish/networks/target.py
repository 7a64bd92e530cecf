"""TargetNetwork networks: copies that follow slowly."""

import copy
from typing import Any

import torch
from torch import nn

from alfish.errors import UsageError
from alfish.networks.flat_parameters import lay_side_by_side, vector_of


class TargetNetwork(nn.Module):
    """A frozen copy of `online`: every `period` calls of `follow` it moves the share `rate` of the way towards it.

    Parameters move; buffers are copied. The copy's parameters take no gradient. Both networks keep the parameters that
    they have; where these lie in memory may change.

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
        parameters = list(self.network.parameters())
        if len({parameter.dtype for parameter in parameters}) == 1:
            lay_side_by_side(parameters)
        self._rate, self._period = rate, period
        self._num_calls = 0
        self._has_buffers = any(True for _ in online.buffers())
        # To walk through modules takes longer than to move what is in them, so what was found is kept: the first
        # parameter of each, where it lay, and all of them.
        self._online: tuple[nn.Module, ...] = ()  # no part of this module, as an attribute alone would be
        self._firsts: list[nn.Parameter] = []
        self._addresses: list[int] = []
        self._mine: list[torch.Tensor] = []
        self._theirs: list[torch.Tensor] = []

    def forward(self, *arguments: Any) -> Any:
        return self.network(*arguments)

    def update(self, online: nn.Module) -> None:
        self.__dict__["_num_calls"] += 1  # a module's `__setattr__` takes longer than all else that most calls do
        if self._num_calls % self._period == 0:
            self._move(online)

    @torch.no_grad()
    def _move(self, online: nn.Module) -> None:
        self._look_at(online)
        if self._rate == 1:
            torch._foreach_copy_(self._mine, self._theirs)
        else:
            torch._foreach_lerp_(self._mine, self._theirs, self._rate)
        if self._has_buffers:
            for buffer, other in zip(self.network.buffers(), online.buffers()):
                buffer.copy_(other)

    def _look_at(self, online: nn.Module) -> None:
        """Finds the parameters of both, each a vector where they lie side by side."""
        if self._online == (online,) and [first.data_ptr() for first in self._firsts] == self._addresses:
            return
        mine, theirs = list(self.network.parameters()), list(online.parameters())
        self._online, self._firsts = (online,), [*mine[:1], *theirs[:1]]
        self._addresses = [first.data_ptr() for first in self._firsts]
        vectors = vector_of(mine), vector_of(theirs)
        self._mine, self._theirs = [*mine], [*theirs]
        if vectors[0] is not None and vectors[1] is not None:
            self._mine, self._theirs = [vectors[0]], [vectors[1]]

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self._num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self._num_calls = state["num_calls"]
