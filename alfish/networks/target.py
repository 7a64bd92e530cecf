"""Target networks, networks that serve as their own targets, and parameters as views of one vector."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from alfish.errors import UsageError


def lay_side_by_side(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Moves parameters of one dtype into one vector, such that they become views of it; returns the vector."""
    vector = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, view in zip(parameters, views(vector, parameters)):
        parameter.data = view
    return vector


def views(vector: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Returns views of consecutive parts of a vector, in the parameters' shapes."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters)]


def vector_of(parameters: Sequence[nn.Parameter]) -> torch.Tensor | None:
    """Returns the vector of which the parameters are contiguous views, in order; None if there is none."""
    if not parameters:
        return None
    first, end = parameters[0], parameters[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for parameter in parameters:
        is_next = parameter.untyped_storage().data_ptr() == memory and parameter.storage_offset() == end
        if not is_next or parameter.dtype != first.dtype or not parameter.is_contiguous():
            return None
        end += parameter.numel()
    return first.detach().as_strided((end - first.storage_offset(),), (1,))


class TargetNetwork(nn.Module):
    """A copy of a network without gradient; `update` moves it towards the network.

        parameter <- parameter + rate (online parameter - parameter),   at every `period`-th call of `update`

    Buffers are copied. In both networks, parameters stay the same objects, but the addresses of their data may change.

    Args:
      online: network to copy; the copy is `self.network`.
      rate: step size of an update, in (0, 1]; 1 copies.
      period: number of calls of `update` between two updates.
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
        # Iterating over modules takes longer than updating their parameters, so their tensors are cached. The cache is
        # valid while the addresses of the first tensors are unchanged.
        self.online: tuple[nn.Module, ...] = (online,)  # in a tuple, so that torch does not register the network
        self._firsts: list[nn.Parameter] = []
        self._addresses: list[int] | None = None  # None if nothing is cached
        self._target_tensors: list[torch.Tensor] = []
        self._online_tensors: list[torch.Tensor] = []

    def forward(self, *arguments: Any) -> Any:
        return self.network(*arguments)

    def reset(self) -> None:
        """Copies the online network again, for example after its parameters were loaded."""
        self.network.load_state_dict(self.online[0].state_dict())

    def update(self, online: nn.Module) -> None:
        """Moves the copy towards `online` in every `period`-th call."""
        self.__dict__["_num_calls"] += 1  # faster than a module's `__setattr__`
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
        """Caches the parameters of the network and of its copy, as one vector each if they are contiguous in memory."""
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


class NoTarget:
    """Replaces a TargetNetwork in algorithms without target networks: runs the online network, without gradient.

    Args:
      online: network to run in place of a target network.
    """

    def __init__(self, online: nn.Module):
        self.network: Any = online

    def __call__(self, *arguments: Any) -> Any:
        with torch.no_grad():
            return self.network(*arguments)

    def update(self, online: nn.Module) -> None:
        """Does nothing, because the online network itself is the target."""


def target_of(online: nn.Module, rate: float | None, period: int) -> TargetNetwork | NoTarget:
    """Returns the target network of `online`; if `rate` is None, `NoTarget`, which runs `online` itself."""
    return NoTarget(online) if rate is None else TargetNetwork(online, rate, period)
