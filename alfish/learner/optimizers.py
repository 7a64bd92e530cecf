"""Optimizers of flat vectors. An optimizer has one vector for each dtype of its parameters, with a gradient in `.grad`.

An update with a non-finite loss or gradient must change nothing. On a CPU, the learner does not call `step` for such an
update. On a GPU, the learner would have to wait for the device to know this. So `step` takes a flag as a tensor,
`is_applied` (0-d float32). If the flag is 0, `step` changes nothing except Adam's count of steps on the host.

`FlatOptimizer` divides a step into `coefficients`, numbers computed on the host, and `apply`, operations on tensors. An
optimizer with these two methods can be part of a compiled update.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol

import gin
import torch

from alfish.errors import UsageError, first_line
from alfish.parameters import NonNegativeFloat, Range, checked

Decay = Annotated[float, Range(0, 1, below=True)]


class Optimizer(Protocol):
    def step(self, learning_rate: float, is_applied: torch.Tensor | None = None) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of an optimizer of the same class; settings are not part of the state."""


def make_optimizer(factory: Callable[..., Optimizer], parameters: Sequence[torch.Tensor]) -> Optimizer:
    """Returns the optimizer of some flat vectors.

    Raises:
      UsageError: the factory does not return an optimizer of this interface.
    """
    made: Any = factory(parameters)
    if isinstance(made, torch.optim.Optimizer):
        raise UsageError(
            f"Learner.optimizer made a {type(made).__name__} of torch; use Learner.optimizer = @TorchOptimizer, with "
            "TorchOptimizer.optimizer = 'AdamW' or your class (in Python functools.partial(TorchOptimizer, 'AdamW'))"
        )
    missing = [name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(made, name, None))]
    if missing:
        raise UsageError(
            f"Learner.optimizer made a {type(made).__name__}, which has no {missing[0]}; derive it from FlatOptimizer, "
            "or define step(learning_rate, is_applied=None), state_dict() and load_state_dict(state)"
        )
    return made


class FlatOptimizer:
    """Base of optimizers whose step has two parts, `coefficients` and `apply`.

    Attributes:
      num_coefficients: length of `coefficients`.
      in_proportion: indices of the coefficients that are proportional to the learning rate.
      tensors: moments, which `apply` updates in place.
    """

    num_coefficients: int
    in_proportion: tuple[int, ...] = (0,)

    def __init__(self, parameters: Sequence[torch.Tensor], num_moments: int):
        self._parameters = list(parameters)
        self.tensors = [torch.zeros_like(p) for _ in range(num_moments) for p in self._parameters]

    def coefficients(self, learning_rate: float) -> list[float]:
        """Returns the numbers that `apply` needs for the next step."""
        raise NotImplementedError

    def scaled(self, coefficients: Sequence[Any], factor: Any) -> list[Any]:
        """Returns the coefficients for a learning rate that is multiplied by `factor`."""
        return [each * factor if k in self.in_proportion else each for k, each in enumerate(coefficients)]

    def count(self) -> None:
        """Called after each step; Adam counts its steps here."""

    def uncount(self) -> None:
        """Called for each counted step that changed nothing because the algorithm requested a stop."""

    def apply(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        coefficients: Sequence[Any],
        is_applied: torch.Tensor | None,
    ) -> None:
        """Updates parameters and moments in place; `coefficients` may be 0-d tensors if `is_applied` is given."""
        raise NotImplementedError

    def step(self, learning_rate: float, is_applied: torch.Tensor | None = None) -> None:
        gradients: Any = [p.grad for p in self._parameters]
        self.apply(self._parameters, gradients, self.tensors, self.coefficients(learning_rate), is_applied)
        self.count()


@gin.configurable(module="alfish.learner.optimizers")
@checked
class Adam(FlatOptimizer):
    """Adam, with decoupled weight decay.

    Args:
      parameters: flat vectors.
      betas: decay rates of the first and second moment.
      eps: number added to the root of the second moment.
      weight_decay: decoupled weight decay; each step subtracts learning rate * weight_decay * parameters.

    Source: Kingma & Ba, 2015, algorithm 1; Loshchilov & Hutter, 2019.
    """

    num_coefficients = 3
    in_proportion: tuple[int, ...] = (0, 2)

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        eps: NonNegativeFloat = 1e-8,
        weight_decay: NonNegativeFloat = 0.0,
    ):
        super().__init__(parameters, num_moments=2)
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._num_steps = 0

    def coefficients(self, learning_rate: float) -> list[float]:
        # Bias corrections are computed on the host: powers of a 0-d tensor are slow, and inaccurate in compiled code.
        first, second = self._betas
        count = self._num_steps + 1
        return [learning_rate / (1 - first**count), math.sqrt(1 - second**count), learning_rate * self._weight_decay]

    def count(self) -> None:
        self._num_steps += 1

    def uncount(self) -> None:
        self._num_steps -= 1

    def denominator(self, second: torch.Tensor, coefficients: Sequence[Any]) -> torch.Tensor:
        """Returns a new tensor by which the first moment is divided."""
        return second.sqrt().div_(coefficients[1]).add_(self._eps)

    def apply(self, parameters, gradients, tensors, coefficients, is_applied):
        size, _, decay = coefficients
        first_rate, second_rate = (1 - beta if is_applied is None else (1 - beta) * is_applied for beta in self._betas)
        for p, gradient, m, v in zip(parameters, gradients, tensors, tensors[len(parameters) :]):
            gradient = _silenced(gradient, is_applied)
            _approach(m, gradient, first_rate)
            _approach(v, gradient.square_(), second_rate)
            if self._weight_decay:
                p.mul_(1 - decay * (1 if is_applied is None else is_applied))
            _subtract(p, m, self.denominator(v, coefficients), size, is_applied)

    def state_dict(self) -> dict[str, Any]:
        count = len(self._parameters)
        return {"first": self.tensors[:count], "second": self.tensors[count:], "num_steps": self._num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_entries(self, state)
        _copy(self.tensors, (*state["first"], *state["second"]))
        self._num_steps = state["num_steps"]


@gin.configurable(module="alfish.learner.optimizers")
@checked
class RAdam(Adam):
    """Rectified Adam, which does not divide by the second moment while its estimate is too uncertain.

    Args:
      parameters: flat vectors.
      betas: decay rates of the first and second moment.
      eps: number added to the root of the second moment.

    Source: Liu et al., 2020, algorithm 2, https://arxiv.org/abs/1908.03265. As in torch, the division starts when the
    length of the second moment's moving average exceeds 5 steps; in the paper, this length is 4.
    """

    in_proportion = (0,)

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        betas: tuple[Decay, Decay] = (0.9, 0.999),
        eps: NonNegativeFloat = 1e-8,
    ):
        super().__init__(parameters, betas, eps)

    def coefficients(self, learning_rate: float) -> list[float]:
        size, root, _ = super().coefficients(learning_rate)
        count, decay = self._num_steps + 1, self._betas[1]
        longest = 2 / (1 - decay) - 1
        length = longest - 2 * count * decay**count / (1 - decay**count)  # length of the average, in steps
        if length <= 5:
            return [size, root, 0.0]
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        return [size * math.sqrt(ratio), root, 1.0]

    def denominator(self, second: torch.Tensor, coefficients: Sequence[Any]) -> torch.Tensor:
        is_divided = coefficients[2]
        return super().denominator(second, coefficients).mul_(is_divided).add_(1 - is_divided)


@gin.configurable(module="alfish.learner.optimizers")
@checked
class RMSprop(FlatOptimizer):
    """RMSprop, with eps outside the square root.

    Args:
      parameters: flat vectors.
      decay: decay rate of the second moment, in [0, 1).
      eps: number added to the root of the second moment.

    Source: Tieleman & Hinton, 2012, lecture 6e.
    """

    num_coefficients = 1

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        decay: Decay = 0.99,
        eps: NonNegativeFloat = 1e-5,
    ):
        super().__init__(parameters, num_moments=1)
        self._decay, self._eps = decay, eps

    def coefficients(self, learning_rate: float) -> list[float]:
        return [learning_rate]

    def apply(self, parameters, gradients, tensors, coefficients, is_applied):
        rate = (1 - self._decay) if is_applied is None else (1 - self._decay) * is_applied
        for p, gradient, v in zip(parameters, gradients, tensors):
            gradient = _silenced(gradient, is_applied)
            _approach(v, gradient.square(), rate)
            _subtract(p, gradient, v.sqrt().add_(self._eps), coefficients[0], is_applied)

    def state_dict(self) -> dict[str, Any]:
        return {"second": self.tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_entries(self, state)
        _copy(self.tensors, state["second"])


@gin.configurable(module="alfish.learner.optimizers")
@checked
class TorchOptimizer:
    """Any torch optimizer that updates entries independently, e.g. with `TorchOptimizer.optimizer = 'AdamW'`.

    On a GPU, each step waits for the device, because it reads `is_applied`.

    Args:
      parameters: flat vectors.
      optimizer: name of a class in torch.optim, or a class or factory of an optimizer; called with (parameters, lr).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Any = gin.REQUIRED):
        name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", optimizer)
        if isinstance(optimizer, str):
            optimizer = getattr(torch.optim, optimizer, None)
            if not (inspect.isclass(optimizer) and issubclass(optimizer, torch.optim.Optimizer)):
                raise UsageError(
                    f"TorchOptimizer.optimizer is {name!r}, but torch.optim has no such class; use 'AdamW'"
                )
        if name == "Adafactor":
            raise UsageError("TorchOptimizer.optimizer is Adafactor, which does not work entry by entry; use 'AdamW'")
        try:
            self._optimizer = optimizer(list(parameters), lr=0.0)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"TorchOptimizer.optimizer is {name}, which does not take flat vectors and a learning rate of 0 "
                f"({first_line(error)}); use 'AdamW'"
            ) from error
        closure = inspect.signature(self._optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"TorchOptimizer.optimizer is {name}, which computes the loss several times in a step; use 'AdamW'"
            )

    def step(self, learning_rate: float, is_applied: torch.Tensor | None = None) -> None:
        if is_applied is None or is_applied > 0:
            for settings in self._optimizer.param_groups:
                settings["lr"] = float(learning_rate)
            self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": type(self._optimizer).__name__, **self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state; settings (`weight_decay`, ...) come from the configuration."""
        here = self.state_dict()
        state = {"optimizer": here["optimizer"], **state}  # older versions did not save the name
        _check_entries(self, state)
        saved = state["optimizer"]
        if saved != here["optimizer"]:
            raise UsageError(
                f"the checkpoint holds the state of {saved}, but TorchOptimizer.optimizer is {here['optimizer']}; keep "
                "the optimizer, or start in an empty directory"
            )
        self._optimizer.load_state_dict({"state": state["state"], "param_groups": here["param_groups"]})


def _check_entries(optimizer: Optimizer, state: dict[str, Any]) -> None:
    if state.keys() != optimizer.state_dict().keys():
        raise UsageError(
            f"the checkpoint holds the state of an optimizer other than {type(optimizer).__name__} "
            f"({', '.join(state)}); keep Learner.optimizer, or start in an empty directory"
        )


def _silenced(gradient: torch.Tensor | None, is_applied: torch.Tensor | None) -> torch.Tensor:
    """Returns the gradient, or zeros if `is_applied` is 0, because a nan times a rate of 0 is still nan."""
    assert gradient is not None
    return gradient if is_applied is None else torch.where(is_applied > 0, gradient, 0)


def _approach(average: torch.Tensor, value: torch.Tensor, rate: Any) -> None:
    """Computes `average.lerp_(value, rate)`; for a tensor `rate`, only by one of the two formulas of torch's lerp."""
    if isinstance(rate, torch.Tensor):
        average.add_((value - average) * rate)
    else:
        average.lerp_(value, rate)


def _subtract(
    parameter: torch.Tensor, numerator: torch.Tensor, denominator: torch.Tensor, size: Any, is_applied: Any
) -> None:
    """Subtracts `size numerator / denominator` from the parameter, unless `is_applied` is 0."""
    if is_applied is None:
        parameter.addcdiv_(numerator, denominator, value=-size)
    else:
        parameter.sub_(numerator / denominator * (size * is_applied))


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
