"""A function of a GPU's tensors, recorded once and then launched as one.

To launch the hundred kernels of a small network's update takes a processor longer than the GPU takes to run them. What
is recorded is a list of kernels and of the memory they work in, so all that a call is given has to be put where the
recorded call found it.
"""

from collections.abc import Callable, Sequence

import torch

from alfish import nest
from alfish.errors import RunError, first_line
from alfish.nest import Nest


class RecordedFunction:
    """`function(arguments)` as one launch.

    Random numbers are those of the plain call, in the same order, if they are of the GPU's default generator.

    Args:
      function: from tensors to a nest of tensors, which has been called some times before; whatever else it reads or
        writes stays where it lies. It reads no value, and waits for nothing.
      arguments: like those of the calls to come, in shapes and dtypes; all on one GPU.

    Raises:
      RunError: the function waits for the GPU, or does something else that cannot be recorded.
    """

    def __init__(self, function: Callable[[list[torch.Tensor]], Nest], arguments: Sequence[torch.Tensor]):
        self._arguments = [argument.clone() for argument in arguments]
        self._launch, results = record(lambda: function(self._arguments), self._arguments[0].device)
        self._results, self._structure = nest.flatten(results)

    def __call__(self, arguments: Sequence[torch.Tensor]) -> Nest:
        for own, argument in zip(self._arguments, arguments, strict=True):
            own.copy_(argument, non_blocking=True)
        self._launch()
        # The next launch writes over what this one wrote.
        results = [torch.empty_like(result) for result in self._results]
        torch._foreach_copy_(results, self._results)
        return nest.unflatten(self._structure, results)


def record(call: Callable[[], Nest], device: torch.device) -> tuple[Callable[[], None], Nest]:
    """What launches `call` from now on, and its results, which each launch writes anew. Nothing is run yet."""
    try:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        back = torch.cuda.stream(torch.cuda.current_stream(device))  # a recording that fails would leave its stream on
        with back, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = call()
    except RuntimeError as error:
        raise RunError(
            f"the update cannot be recorded as a CUDA graph ({first_line(error)}); set Learner.cuda_graphs = False"
        ) from error
    return graph.replay, results
