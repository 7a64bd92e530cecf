"""Runs networks on windows of rows, from the correct state, with gradients for the rows that the loss uses."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from alfish import nest
from alfish.data import Experience, TimeStep, trainable
from alfish.nest import Nest

Network: TypeAlias = Callable[[TimeStep, Nest], tuple[Any, Nest]]  # (time step, state) to (output, state)


def burn_in_state(network: Network, burn_in: TimeStep | None, state: Nest) -> Nest:
    """Returns the state after the burn-in rows, without gradient; returns `state` if there are no burn-in rows.

    The stored state was computed with older parameters; burn-in updates it. Source: Kapturowski et al., 2019.

    Args:
      network: network that computes the state.
      burn_in: burn-in rows `[K, N]`, or None.
      state: state before the first burn-in row, a nest of `[N, ...]`.
    """
    if burn_in is None:
        return state
    with torch.no_grad():
        return network(burn_in, state)[1]


class Features(NamedTuple):
    """Inputs of critics and an actor over a window; T' is the number of rows that the loss uses, 1 without memory."""

    critic: torch.Tensor  # [T', N, ...]
    actor: Nest  # [T', N, ...]
    next_actor: Nest  # [L-1, N, ...] at rows 1 to L-1
    next_critic: torch.Tensor  # [L-1, N, ...] features of the target critics, at rows 1 to L-1


class Window:
    """Runs networks on the rows of a window that the loss uses, and on rows 1 to L-1.

    Without memory, the loss uses row 0, and a network runs over row 0 and over rows 1 to L-1 separately. With memory,
    the loss uses all rows but the last, and a network runs over the whole window, from the stored state.

    Args:
      experience: rows `[L, N]`.
      every_row: whether the loss uses all rows except the last, as with memory.

    Attributes:
      time_step: all rows, `[L, N]`.
    """

    def __init__(self, experience: Experience, every_row: bool):
        self.time_step = experience.time_step
        self._experience, self._every_row = experience, every_row
        if not every_row:
            self._now, self._later = nest.split(experience.time_step, 1)

    def trained(self, network: Network) -> Any:
        """Returns the output at the rows that the loss uses, `[T', N, ...]`; T' is 1, or L - 1 with memory."""
        if self._every_row:
            return self._run(network, nest.at(self._experience.time_step, slice(0, -1)))
        return network(self._now, self._experience.state)[0]

    def later(self, network: Network) -> Any:
        """Returns the output at rows 1 to L-1, `[L-1, N, ...]`, without gradient."""
        with torch.no_grad():
            if self._every_row:
                return self._run(network, self._experience.time_step)[1:]
            return network(self._later, self._experience.state)[0]

    def both(self, network: Network) -> tuple[Any, Any]:
        """Returns `trained` and `later`; with memory, from one run of the network."""
        if not self._every_row:
            return self.trained(network), self.later(network)
        output = self._run(network, self._experience.time_step)
        return output[:-1], output[1:].detach()

    def _run(self, network: Network, rows: TimeStep) -> Any:
        return network(rows, burn_in_state(network, self._experience.burn_in, self._experience.state))[0]


def first_and_bootstrap_rows(experience: Experience, lambda_: float) -> Experience:
    """Reduces windows `[L, N]` to row 0 and its bootstrap row, `[2, N]`.

    With `lambda_` 0, the return bootstraps from row 1. With `lambda_` 1, the return bootstraps from the first row after
    row 0 that is not trainable, or else from the last row. For other `lambda_`, the return reads all rows,
    and windows are returned unchanged.
    """
    step_type = experience.time_step.step_type
    length = step_type.shape[0]
    if length == 2 or 0 < lambda_ < 1:
        return experience
    rows = experience.time_step, experience.action, experience.info, experience.return_to_go
    if lambda_ == 0:
        kept = nest.at(rows, slice(0, 2))
    else:
        row = torch.arange(1, length - 1, device=step_type.device).unsqueeze(1)
        end = torch.where(trainable(step_type)[1:], length - 1, row).amin(0)  # [N] first row not trainable, or L-1
        column = torch.arange(end.shape[0], device=end.device)
        kept = nest.at(rows, (torch.stack([torch.zeros_like(end), end]), column))
    time_step, action, info, return_to_go = kept
    return experience._replace(time_step=time_step, action=action, info=info, return_to_go=return_to_go)
