"""Layers: initial weights, linear layers with weights of fixed norm or with noise, activations, and MLPs."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import gin
import torch
import torch.nn.functional as F
from torch import nn

from alfish.errors import UsageError
from alfish.networks.bodies.batch_norm import BatchNorm, Moments
from alfish.parameters import LayerSize, PositiveInt, checked
from alfish.parameters.parts import build_network


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float = 2**0.5) -> nn.Module:
    """Initializes a layer with orthogonal weights, scaled by `gain`, and zero biases. Source: Saxe et al., 2014."""
    with torch.no_grad():
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


def linear(
    input_size: int, output_size: int, gain: float = 2**0.5, noisy: bool = False, bias: bool = True, unit: bool = False
) -> nn.Module:
    """Returns a linear layer with orthogonal weights, a `UnitLinear` if `unit`, or a `NoisyLinear` if `noisy`."""
    if noisy:
        return noisy_linear(input_size, output_size, bias, unit)
    if not unit:
        return orthogonal(nn.Linear(input_size, output_size, bias), gain)
    # A gain of 0 would give rows of zeros, which cannot be scaled to norm 1.
    layer: Any = orthogonal(UnitLinear(input_size, output_size, bias), gain or 1.0)
    layer.project()
    return layer


class Projected(abc.ABC):
    """Base of layers whose weights have a fixed norm.

    The learner calls `project` after each update of the layer. Gradients and the optimizer's moments are not projected.

    Attributes:
      weight: weight of the layer.
    """

    weight: Any

    @abc.abstractmethod
    def project(self) -> None:
        """Scales the weights to their fixed norm, in place."""


class UnitRows(Projected):
    """Base of linear layers whose weights have norm 1 for each output. Biases are not constrained.

    Attributes:
      input_dim: dimension of the inputs in `weight`.
    """

    input_dim: ClassVar[int]

    @torch.no_grad()
    def project(self) -> None:
        self.weight.div_(torch.linalg.vector_norm(self.weight, dim=self.input_dim, keepdim=True))


class UnitLinear(UnitRows, nn.Linear):
    """`nn.Linear` with rows of norm 1; `project` must be called after its weights are initialized."""

    input_dim = 1


class UnitScale(Projected):
    """Base of norm layers of d features; scales and offsets together have norm sqrt(d)."""

    @torch.no_grad()
    def project(self) -> None:
        bias = getattr(self, "bias", None)
        parts = [self.weight] if bias is None else [self.weight, bias]
        square: Any = sum(part.square().sum(-1, keepdim=True) for part in parts)
        factor = (self.weight.shape[-1] / square).sqrt()
        for part in parts:
            part.mul_(factor)


class NoisyLinear(nn.Module):
    """A linear layer with learned noise on its weights, drawn for each pass; no noise in evaluation mode.

        y = (w + s_w (f(e_out) f(e_in)^T)) x + b + s_b f(e_out),   f(e) = sign(e) sqrt(|e|),   e ~ N(0, 1)

    Args:
      input_size: number of input features.
      output_size: number of output features.

    Source: Fortunato et al., 2018, section 3, with factorised noise, https://arxiv.org/abs/1706.10295.
    """

    explores = True  # see `algorithms.acting.explorers`

    def __init__(self, input_size: int, output_size: int):
        super().__init__()
        bound = input_size**-0.5
        self.weight = nn.Parameter(torch.empty(output_size, input_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(output_size).uniform_(-bound, bound))
        self.weight_scale = nn.Parameter(torch.full((output_size, input_size), 0.5 * bound))
        self.bias_scale = nn.Parameter(torch.full((output_size,), 0.5 * bound))

    def freeze(self) -> None:
        """Turns off noise permanently, also in rollouts; called for frozen modules."""
        self.explores = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return F.linear(x, self.weight, self.bias)
        noise = torch.randn(sum(self.weight.shape), device=x.device)
        rows, columns = (noise.sign() * noise.abs().sqrt()).split(self.weight.shape)
        weight = self.weight + self.weight_scale * torch.outer(rows, columns)
        return F.linear(x, weight, self.bias + self.bias_scale * rows)


def noisy_linear(input_size: int, output_size: int, bias: bool, unit: bool) -> NoisyLinear:
    """Returns a `NoisyLinear`; raises UsageError if `bias` is False or `unit` is True."""
    if unit or not bias:
        raise UsageError("noisy layers need bias = True and unit_rows = False")
    return NoisyLinear(input_size, output_size)


class Tanh(nn.Module):
    """Hyperbolic tangent. For many x on a CPU, 2 sigmoid(2x) - 1 takes a third of tanh's time, with an error < 2e-7."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda or x.numel() < 4096:
            return torch.tanh(x)
        return (2 * torch.sigmoid(x + x)).sub_(1)


class RMSNorm(nn.Module):
    """Divides features by the root of their mean square, and scales each feature by a learned weight.

    Its operations are elementary, because each is translated to numpy for acting. Source: Zhang & Sennrich, 2019.
    """

    def __init__(self, size: int, epsilon: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + self._epsilon).sqrt() * self.weight


NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": RMSNorm, "batch": BatchNorm}
ACTIVATIONS: dict[Any, Any] = {"tanh": Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU, "gelu": nn.GELU}


@gin.configurable(module="alfish.networks")
@checked
class MLP(nn.Sequential):
    """Linear layers, each followed by an activation.

    Args:
      input_size: number of input features.
      layers: number of features of each layer; empty means no layer.
      activation: name of the activation, one of `ACTIVATIONS`, or a module class.
      norm: kind of normalization at each activation: 'layer' (mean 0 and standard deviation 1), 'rms' (mean square 1),
        'batch' (see `BatchNorm`; also normalizes the input; only for variants of SAC) or None.
      norm_after: whether to normalize after each activation instead of before.
      noisy: whether layers are `NoisyLinear`, which explore by noise on their weights; requires `bias`, and excludes
        `unit_rows`.
      bias: whether linear layers have a bias.
      unit_rows: whether the weights of each output have norm 1, see `UnitRows`.
    """

    def __init__(
        self,
        input_size: PositiveInt,
        layers: Sequence[LayerSize] = (64, 64),
        activation: Literal["tanh", "relu", "elu", "silu", "gelu"] | Callable[[], nn.Module] = "tanh",
        norm: Literal["layer", "rms", "batch"] | None = None,
        norm_after: bool = False,
        noisy: bool = False,
        bias: bool = True,
        unit_rows: bool = False,
    ):
        modules: list[nn.Module] = [BatchNorm(input_size)] if norm == "batch" else []
        for size in layers:
            modules.append(linear(input_size, size, noisy=noisy, bias=bias, unit=unit_rows))
            norms = [] if norm is None else [NORMS[norm](size)]
            active = build_network(ACTIVATIONS.get(activation, activation), "MLP.activation", has=())
            modules += [active, *norms] if norm_after else [*norms, active]
            input_size = size
        super().__init__(*modules)
        self.output_size = input_size

    def forward(self, x: torch.Tensor, moments: Moments | None = None) -> torch.Tensor:
        """Returns features `[..., output_size]`; with `moments`, normalized by the statistics of this batch."""
        for module in self:
            x = module(x) if moments is None or not isinstance(module, BatchNorm) else module(x, moments)
        return x
