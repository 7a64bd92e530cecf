"""Weights of fixed norm: each output of a linear layer takes its inputs by weights of norm 1."""

import abc
from typing import Any, ClassVar

import torch
from torch import nn


class Projected(abc.ABC):
    """Base of layers whose weights have a fixed norm.

    The learner calls `project` after each update of the layer. Neither gradients nor the optimizer's moments are
    projected.

    Attributes:
      weight: of the layer.
    """

    weight: Any

    @abc.abstractmethod
    def project(self) -> None:
        """Scales the weights to their norm, in place."""


class UnitRows(Projected):
    """Base of linear layers whose weights have norm 1, for each output. Biases are free.

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
    """Base of norm layers whose scales and offsets have norm sqrt(d) together, d the number of features."""

    @torch.no_grad()
    def project(self) -> None:
        bias = getattr(self, "bias", None)
        parts = [self.weight] if bias is None else [self.weight, bias]
        square: Any = sum(part.square().sum(-1, keepdim=True) for part in parts)
        factor = (self.weight.shape[-1] / square).sqrt()
        for part in parts:
            part.mul_(factor)
