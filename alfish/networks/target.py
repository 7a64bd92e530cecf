"""Target networks."""

import copy
from typing import Any

import torch
from torch import nn

from alfish.errors import UsageError
from alfish.networks.flat_parameters import lay_side_by_side, vector_of


class TargetNetwork(nn.Module):
    """A copy of a network that takes no gradient, and that `update` moves towards the network.

        parameter <- parameter + rate (online parameter - parameter),   at every `period`-th call of `update`

    Buffers are copied. Parameters stay the same objects in both networks; their memory may move.

    Args:
      online: the network to copy; the copy is `self.network`.
      rate: in (0, 1]; 1 copies.
      period: in calls of `update`.
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
        # Iterating over modules takes longer than moving their parameters. Their tensors are therefore cached, and the
        # addresses of the first ones tell whether the cache is valid.
        self.online: tuple[nn.Module, ...] = (online,)  # in a tuple, so that torch does not register it
        self._firsts: list[nn.Parameter] = []
        self._addresses: list[int] | None = None  # None: nothing is cached
        self._target_tensors: list[torch.Tensor] = []
        self._online_tensors: list[torch.Tensor] = []

    def forward(self, *arguments: Any) -> Any:
        return self.network(*arguments)

    def reset(self) -> None:
        """Copies the network anew, as the constructor does; its values may have been loaded since."""
        self.network.load_state_dict(self.online[0].state_dict())

    def update(self, online: nn.Module) -> None:
        """Moves the copy towards `online`, in every `period`-th call."""
        self.__dict__["_num_calls"] += 1  # a module's `__setattr__` takes longer than the rest of most calls
        if self._num_calls % self._period == 0:
            self._move(online)

    @torch.no_grad()
    def _move(self, online: nn.Module) -> None:
        self._cache_parameters(online)
        if self._rate == 1:
            torch._foreach_copy_(self._target_tensors, self._online_tensors)
        else:
            torch._foreach_lerp_(self._target_tensors, self._online_tensors, self._rate)
        if self._has_buffers:
            torch._foreach_copy_(list(self.network.buffers()), list(online.buffers()))

    def _cache_parameters(self, online: nn.Module) -> None:
        """Caches the parameters of both networks, as one vector each if they are contiguous in memory."""
        if self.online == (online,) and [first.data_ptr() for first in self._firsts] == self._addresses:
            return
        mine, theirs = list(self.network.parameters()), list(online.parameters())
        self.online, self._firsts = (online,), [*mine[:1], *theirs[:1]]
        self._addresses = [first.data_ptr() for first in self._firsts]
        vectors = vector_of(mine), vector_of(theirs)
        self._target_tensors, self._online_tensors = [*mine], [*theirs]
        if vectors[0] is not None and vectors[1] is not None:
            self._target_tensors, self._online_tensors = [vectors[0]], [vectors[1]]

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self._num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self._num_calls = state["num_calls"]
