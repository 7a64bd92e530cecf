"""Parameters as views of one vector, so that one operation updates all of them."""

from collections.abc import Sequence

import torch
from torch import nn


def lay_side_by_side(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Moves parameters of one dtype into a vector, makes them views of it, and returns it."""
    vector = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, view in zip(parameters, views(vector, parameters)):
        parameter.data = view
    return vector


def views(vector: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Returns views of consecutive parts of a vector, in the parameters' shapes."""
    parts = vector.split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters)]


def vector_of(parameters: Sequence[nn.Parameter]) -> torch.Tensor | None:
    """Returns the vector that the parameters, in their order, are contiguous views of; None if there is none."""
    if not parameters:
        return None
    first, end = parameters[0], parameters[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for parameter in parameters:
        is_next = parameter.untyped_storage().data_ptr() == memory and parameter.storage_offset() == end
        if not is_next or parameter.dtype != first.dtype or not parameter.is_contiguous():
            return None
        end += parameter.numel()
    return first.detach().as_strided((end - first.storage_offset(),), (1,))
