"""Several memories, one after another."""

from collections.abc import Callable, Sequence
from typing import Any

import gin
import torch
from torch import nn

from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.networks.memory import GRU
from alfish.parameters import PositiveInt, checked
from alfish.parameters.parts import build_memory


@gin.configurable(module="alfish.networks")
@checked
class StackedMemory(nn.Module):
    """Memories in sequence; each takes the output of the previous one. The state is the tuple of their states.

    Args:
      input_size: number of input features.
      layers: classes or factories of the memories; each is called with the number of its input features. A scope such
        as `@first/GRU` allows separate settings (`first/GRU.size`).
      residual: whether each layer after the first adds its input to its output, which requires equal sizes. Stacked
        GRUs and LSTMs usually have no residual connections; an `AttentionWindow` already contains one.

    Raises:
      UsageError: there is no layer, or sizes are unequal with residual connections.
    """

    def __init__(
        self, input_size: PositiveInt, layers: Sequence[Callable[[int], Any]] = (GRU, GRU), residual: bool = False
    ):
        super().__init__()
        if not layers:
            raise UsageError("StackedMemory.layers is empty; name at least one memory, such as [@GRU, @GRU]")
        self.output_size: int = input_size
        self._residual = residual
        self.layers = nn.ModuleList()
        for k, layer in enumerate(layers):
            memory = build_memory(layer, f"StackedMemory.layers[{k}]", self.output_size)
            if residual and k > 0 and memory.output_size != self.output_size:
                raise UsageError(
                    f"StackedMemory.residual is True, but StackedMemory.layers[{k}] returns {memory.output_size} "
                    f"features for {self.output_size} inputs; give all layers the same size, or set residual = False"
                )
            self.layers.append(memory)
            self.output_size = memory.output_size

    def initial_state(self, batch_size: int) -> Nest:
        """Returns the initial states of the layers."""
        return tuple(memory.initial_state(batch_size) for memory in self.layers)  # type: ignore[operator]

    def forward(self, features: torch.Tensor, state: Nest, step_type: torch.Tensor) -> tuple[torch.Tensor, Nest]:
        """Returns features `[B, H]` or `[T, N, H]`, and the states after the last row; see `Memory.forward`."""
        after = []
        for k, (memory, before) in enumerate(zip(self.layers, state, strict=True)):
            output, left = memory(features, before, step_type)
            features = features + output if self._residual and k > 0 else output
            after.append(left)
        return features, tuple(after)
