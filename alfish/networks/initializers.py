"""Weight initialisation."""

import torch
from torch import nn


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float = 2**0.5) -> nn.Module:
    """Orthogonal weights scaled by `gain`, zero bias. Returns the layer. Source: Saxe et al., 2014."""
    with torch.no_grad():
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            layer.bias.zero_()
    return layer
