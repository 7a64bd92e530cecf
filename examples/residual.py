"""A network of your own: an MLP with residual blocks, in place of the shipped one."""

import gin
import torch
from torch import nn


@gin.configurable
class ResidualMLP(nn.Module):
    """Maps features `[..., input_size]` to features `[..., width]`."""

    def __init__(self, input_size: int, width: int = 64, num_blocks: int = 2):
        super().__init__()
        self.output_size = width  # what the heads on top of it take
        self._first = nn.Linear(input_size, width)
        self._blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(num_blocks)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = self._first(features)
        for block in self._blocks:
            features = features + block(features)
        return features
