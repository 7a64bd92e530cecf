"""Weights on the unit sphere: each output of a linear layer takes its inputs by weights of norm 1."""

from typing import Any, ClassVar

import torch
from torch import nn


class UnitRows:
    """Base of linear layers whose weights have norm 1, for each output. Biases are free.

    The learner calls `project` after each update of the layer. Neither gradients nor the optimizer's moments are
    projected.

    Attributes:
      weight: of the layer.
      input_dim: dimension of the inputs in `weight`.
    """

    weight: Any
    input_dim: ClassVar[int]

    @torch.no_grad()
    def project(self) -> None:
        """Scales the weights to norm 1, in place."""
        self.weight.div_(torch.linalg.vector_norm(self.weight, dim=self.input_dim, keepdim=True))


class UnitLinear(UnitRows, nn.Linear):
    """`nn.Linear` with rows of norm 1; `project` must be called after its weights are initialized."""

    input_dim = 1
