"""Networks that are their own targets."""

from typing import Any

import torch
from torch import nn

from alfish.networks.target import TargetNetwork


class NoTarget:
    """Takes the place of a TargetNetwork where there is none: the network itself, without gradient.

    Args:
      online: the network.
    """

    def __init__(self, online: nn.Module):
        self.network: Any = online

    def __call__(self, *arguments: Any) -> Any:
        with torch.no_grad():
            return self.network(*arguments)

    def update(self, online: nn.Module) -> None:
        """Does nothing: the network has been updated."""


def target_of(online: nn.Module, rate: float | None, period: int) -> TargetNetwork | NoTarget:
    """Returns the target of a network; of `rate` None, the network itself."""
    return NoTarget(online) if rate is None else TargetNetwork(online, rate, period)
