"""A function of GPU tensors, recorded as a CUDA graph and launched in one call.

A CPU takes longer to launch the hundred kernels of a small network's update than the GPU takes to run them. A CUDA
graph launches all kernels in one call, but its memory addresses are fixed. So each call first copies its arguments to
the addresses of the recorded call.
"""

from collections.abc import Callable, Sequence

import torch

from alfish import nest
from alfish.errors import RunError, first_line
from alfish.nest import Nest


class RecordedFunction:
    """A recorded `function(arguments)`.

    Random numbers come from the GPU's default generator, in the same order as in calls of the function itself.

    Args:
      function: function that maps tensors to a nest of tensors; it was already called several times. The function must
        not read a tensor's value or wait for the GPU. All tensors that it uses besides its arguments must keep their
        memory.
      arguments: example arguments with the shapes and dtypes of later calls, all on the same GPU.

    Raises:
      RunError: the function cannot be recorded, for example because it waits for the GPU.
    """

    def __init__(self, function: Callable[[list[torch.Tensor]], Nest], arguments: Sequence[torch.Tensor]):
        self._arguments = [argument.clone() for argument in arguments]
        self._launch, results = record(lambda: function(self._arguments), self._arguments[0].device)
        self._results, self._structure = nest.flatten(results)

    def __call__(self, arguments: Sequence[torch.Tensor]) -> Nest:
        for own, argument in zip(self._arguments, arguments, strict=True):
            own.copy_(argument, non_blocking=True)
        self._launch()
        # The results are copied, because the next launch overwrites the recorded tensors.
        results = [torch.empty_like(result) for result in self._results]
        torch._foreach_copy_(results, self._results)
        return nest.unflatten(self._structure, results)


def record(call: Callable[[], Nest], device: torch.device) -> tuple[Callable[[], None], Nest]:
    """Records `call` without running it; returns a launch function, and the results, which each launch overwrites."""
    try:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        back = torch.cuda.stream(torch.cuda.current_stream(device))  # restores the stream if recording fails
        with back, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = call()
    except RuntimeError as error:
        raise RunError(
            f"the update cannot be recorded as a CUDA graph ({first_line(error)}); set Learner.cuda_graphs = False"
        ) from error
    return graph.replay, results
