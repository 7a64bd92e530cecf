"""Optimizers over flat vectors: a parameter group is one tensor, or one for each dtype, with its gradient in `.grad`.

`step(learning_rate, keep)` makes one update where `keep` (0-d float32) is 1, and changes nothing where it is 0, without
looking at its value, so that an update that is not finite is skipped without waiting for the device.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import gin
import torch


class Optimizer(Protocol):
    def step(self, learning_rate: float, keep: torch.Tensor) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@gin.configurable(module="alfish.optimizers")
class Adam:
    """Adam, with decoupled weight decay.

    Args:
      parameters: flat vectors.
      betas: decay rates of the first and second moment.
      eps: added to the root of the second moment.
      weight_decay: share of the parameters that is subtracted per unit of learning rate.

    Source: Kingma & Ba, 2015, algorithm 1; Loshchilov & Hutter, 2019.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):  # fmt: skip
        self._parameters = list(parameters)
        self._first = [torch.zeros_like(p) for p in self._parameters]
        self._second = [torch.zeros_like(p) for p in self._parameters]
        device = self._parameters[0].device
        self._rates = 1 - torch.tensor(betas, dtype=torch.float64, device=device)
        self._remaining = torch.ones(2, dtype=torch.float64, device=device)  # beta^t of the bias corrections
        self._eps, self._weight_decay = eps, weight_decay

    def step(self, learning_rate: float, keep: torch.Tensor) -> None:
        rates = self._rates * keep
        self._remaining -= self._remaining * rates
        scale = learning_rate * keep / (1 - self._remaining[0])
        root = (1 - self._remaining[1]).sqrt()
        first_rate, second_rate = rates.float().unbind()
        for p, m, v in zip(self._parameters, self._first, self._second):
            gradient = torch.where(keep > 0, p.grad, 0)  # a rate of 0 does not silence a nan
            m.lerp_(gradient, first_rate)
            v.lerp_(gradient.square_(), second_rate)
            if self._weight_decay:
                p.mul_(1 - learning_rate * self._weight_decay * keep)
            p.sub_(v.sqrt().div_(root).add_(self._eps).reciprocal_().mul_(m).mul_(scale))

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "second": self._second, "remaining": self._remaining}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip((*self._first, *self._second), (*state["first"], *state["second"]), strict=True):
            mine.copy_(saved)
        self._remaining.copy_(state["remaining"])


@gin.configurable(module="alfish.optimizers")
class RMSprop:
    """RMSprop, with eps outside the root.

    Args:
      parameters: flat vectors.
      decay: of the second moment.
      eps: added to the root of the second moment.

    Source: Tieleman & Hinton, 2012, lecture 6e.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], decay: float = 0.99, eps: float = 1e-5):
        self._parameters = list(parameters)
        self._second = [torch.zeros_like(p) for p in self._parameters]
        self._decay, self._eps = decay, eps

    def step(self, learning_rate: float, keep: torch.Tensor) -> None:
        for p, v in zip(self._parameters, self._second):
            gradient = torch.where(keep > 0, p.grad, 0)
            v.lerp_(gradient.square(), (1 - self._decay) * keep)
            p.sub_(gradient.div_(v.sqrt().add_(self._eps)).mul_(learning_rate))

    def state_dict(self) -> dict[str, Any]:
        return {"second": self._second}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self._second, state["second"], strict=True):
            mine.copy_(saved)


@gin.configurable(module="alfish.optimizers")
class TorchOptimizer:
    """Any torch optimizer that works entry by entry (SGD, AdamW, NAdam, RAdam, ...): `@TorchOptimizer`.

    Looks at `keep`, and so waits for the device.

    Args:
      parameters: flat vectors.
      optimizer: a torch optimizer class, or a configured one; takes (parameters, lr).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Any = gin.REQUIRED):
        self._optimizer = optimizer(list(parameters), lr=0.0)

    def step(self, learning_rate: float, keep: torch.Tensor) -> None:
        if keep > 0:
            for settings in self._optimizer.param_groups:
                settings["lr"] = learning_rate
            self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)
