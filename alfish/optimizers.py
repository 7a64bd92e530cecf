"""Optimizers over flat vectors: a parameter group is one tensor, or one for each dtype, with its gradient in `.grad`.

An update that is not finite must change nothing. On a CPU the learner looks, and does not call `step`. On a GPU a look
would wait for the device, so `step` gets a flag there, `keep` (0-d float32), and changes nothing where it is 0; only
Adam's count of steps, which lives on the host, goes on.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import gin
import torch


class Optimizer(Protocol):
    def step(self, learning_rate: float, keep: torch.Tensor | None = None) -> None: ...

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
        self,
        parameters: Sequence[torch.Tensor],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        self._parameters = list(parameters)
        self._first = [torch.zeros_like(p) for p in self._parameters]
        self._second = [torch.zeros_like(p) for p in self._parameters]
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._num_steps = 0

    def step(self, learning_rate: float, keep: torch.Tensor | None = None) -> None:
        self._num_steps += 1
        # Bias corrections on the host: powers of a 0-d tensor are slow, and lose digits in compiled code.
        size, root = (1 - beta**self._num_steps for beta in self._betas)
        size, root = learning_rate / size, math.sqrt(root)
        first_rate, second_rate = (1 - beta if keep is None else (1 - beta) * keep for beta in self._betas)
        for p, m, v in zip(self._parameters, self._first, self._second):
            gradient = _silenced(p.grad, keep)
            m.lerp_(gradient, first_rate)
            v.lerp_(gradient.square_(), second_rate)
            if self._weight_decay:
                p.mul_(1 - learning_rate * self._weight_decay * (1 if keep is None else keep))
            denominator = v.sqrt().div_(root).add_(self._eps)
            if keep is None:
                p.addcdiv_(m, denominator, value=-size)
            else:
                p.sub_(m / denominator * (size * keep))

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "second": self._second, "num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _copy((*self._first, *self._second), (*state["first"], *state["second"]))
        self._num_steps = state["num_steps"]


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

    def step(self, learning_rate: float, keep: torch.Tensor | None = None) -> None:
        rate = (1 - self._decay) if keep is None else (1 - self._decay) * keep
        for p, v in zip(self._parameters, self._second):
            gradient = _silenced(p.grad, keep)
            v.lerp_(gradient.square(), rate)
            p.addcdiv_(gradient, v.sqrt().add_(self._eps), value=-learning_rate)

    def state_dict(self) -> dict[str, Any]:
        return {"second": self._second}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _copy(self._second, state["second"])


@gin.configurable(module="alfish.optimizers")
class TorchOptimizer:
    """Any torch optimizer that works entry by entry (SGD, AdamW, NAdam, RAdam, ...): `@TorchOptimizer`.

    Looks at `keep`, and so waits for a GPU.

    Args:
      parameters: flat vectors.
      optimizer: a torch optimizer class, or a configured one; takes (parameters, lr).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Any = gin.REQUIRED):
        self._optimizer = optimizer(list(parameters), lr=0.0)

    def step(self, learning_rate: float, keep: torch.Tensor | None = None) -> None:
        if keep is None or keep > 0:
            for settings in self._optimizer.param_groups:
                settings["lr"] = learning_rate
            self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


def _silenced(gradient: torch.Tensor | None, keep: torch.Tensor | None) -> torch.Tensor:
    """The gradient, or zeros where `keep` is 0: a rate of 0 alone does not silence a nan."""
    assert gradient is not None
    return gradient if keep is None else torch.where(keep > 0, gradient, 0)


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
