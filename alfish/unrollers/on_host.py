"""The unroller that acts on the CPU while a GPU trains."""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch

from alfish import host, nest, specs
from alfish.algorithms.acting import ModeSwitch, changing_tensors, tensors_of
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.parameters import NonNegativeInt, checked
from alfish.transforms import Transforms
from alfish.unrollers.sync import SyncUnroller


class Weights(NamedTuple):
    """Weights that were current at the start of an unroll.

    Attributes:
      version: `policy_version` of the weights.
      indices: indices of the tensors among all tensors that training changes.
      values: function that waits for the values and returns them as bytes, see `host.PackedReader`.
    """

    version: int
    indices: list[int]
    values: Callable[[], torch.Tensor]


@gin.configurable(module="alfish.unrollers")
@checked
class HostUnroller(SyncUnroller):
    """`SyncUnroller` that acts on the CPU, with a copy of the policy, while the algorithm trains on a GPU.

    Launching a small policy on a GPU takes longer than computing its actions in numpy, and each action waits for all
    updates before it. Instead, weights are copied from the GPU at the start of each unroll. A policy that acts in numpy
    needs only the tensors that it reads; for other policies, all tensors are copied. With a lag of 1, the unroll does
    not wait for this copy. It acts with the weights that were copied at the start of the previous unroll, so
    environments step while the GPU updates. The lag is a fixed number of unrolls, not a time, so a seed gives the same
    bits in each run. `generate_batch` and `generate_episodes` act with the same lag.

    Args:
      environment, algorithm, transforms: parts of the run, see `Unroller`; the environment's rows are on the CPU.
      numpy_policy, overwrite_policy_output: see `SyncUnroller`.
      lag: number of unrolls by which the acting weights are older than the newest weights. With 0, rows equal those of
        `SyncUnroller` up to rounding. None means 0 for on-policy algorithms, and 1 for off-policy algorithms.

    Raises:
      UsageError: the environment's rows are on a GPU, or the algorithm cannot learn from rows of older weights.
    """

    def __init__(
        self,
        environment: Environment,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        numpy_policy: NonNegativeInt | None = 0,
        overwrite_policy_output: bool = False,
        lag: NonNegativeInt | None = None,
    ):
        zeros = specs.zeros(environment.observation_spec, (1,))
        device = nest.leaves(nest.tensors(environment.convert(zeros)))[0].device
        if device.type != "cpu":
            raise UsageError(
                f"HostUnroller acts on the CPU, but the rows of {environment.name} are on {device}; bind "
                "Trainer.unroller = @SyncUnroller"
            )
        if algorithm.on_policy and lag and not algorithm.unroll_use.handles_stale_policies:
            raise UsageError(
                f"HostUnroller.lag is {lag}, but {type(algorithm).__name__} is on-policy and does not correct for rows "
                "of older weights; set it to 0, or train with APPO"
            )
        self._trainee, self._trained = algorithm, changing_tensors(algorithm, transforms)
        own = _on_cpu(algorithm, transforms)
        ModeSwitch(own[0]).switch(training=False)
        super().__init__(environment, *own, numpy_policy, overwrite_policy_output)
        self._own = changing_tensors(*own)
        self._lag = int(not algorithm.on_policy) if lag is None else lag
        self._weights: deque[Weights] = deque()  # those of the next `lag` unrolls
        self._version = 0
        self._sources: list[torch.Tensor] | None = []  # `PolicyRunner.sources` for which `_reader` was made
        self._read: list[int] = []  # indices of the tensors of `_reader`
        self._written: list[int] = []  # indices of the tensors of `_memory`
        self._reader: host.PackedReader
        self._memory: host.PackedMemory

    @property
    def _acting_version(self) -> int:
        return self._version

    def start(self) -> None:
        if self.time_step is None and self._trainee.progress.device.type == "cpu":
            self.log("HostUnroller acts with a copy of the policy, but a CPU trains; SyncUnroller needs no copy")
        super().start()

    def state_dict(self) -> dict[str, Any]:
        waiting = [(one.version, one.indices, one.values()) for one in self._weights]
        return {**super().state_dict(), "weights": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._weights = deque(
            Weights(version, indices, lambda values=values: values)  # type: ignore[misc]
            for version, indices, values in state.get("weights", ())
        )

    def _tell_progress(self) -> None:
        if self.environment.follows_progress:
            self.environment.set_progress(self._trainee.progress_number())

    def _refresh(self) -> None:
        """Reads the weights for later unrolls, and acts with those of `lag` unrolls ago, or else with the oldest."""
        self._begin_to_read()
        while len(self._weights) > self._lag + 1:  # a resumed run may have a smaller lag
            self._weights.popleft()
        while self._actor.acts_in_torch and len(self._weights[0].indices) < len(self._read):
            self._weights.popleft()  # torch may read tensors that these weights lack
        oldest = self._weights[0]
        if len(self._weights) > self._lag:
            self._weights.popleft()
        if oldest.indices != self._written:
            self._written = oldest.indices
            self._memory = host.PackedMemory([self._own[index] for index in oldest.indices])
        self._memory.write(oldest.values())
        self._version = oldest.version
        super()._refresh()

    def _begin_to_read(self) -> None:
        """Begins to copy the tensors that acting reads."""
        sources = self._actor.sources
        if sources is not self._sources:
            self._sources = sources
            wanted = {id(tensor) for tensor in sources or self._own}
            self._read = [index for index, tensor in enumerate(self._own) if id(tensor) in wanted]
            self._reader = host.PackedReader([self._trained[index] for index in self._read])
        self._weights.append(Weights(self.policy_version, self._read, self._reader.read_later()))


def _on_cpu(algorithm: RLAlgorithm, transforms: Transforms) -> tuple[RLAlgorithm, Transforms]:
    """Returns copies whose parameters and buffers are on the CPU; modules that share a tensor share its copy."""
    copies: dict[int, Any] = {}
    for named in tensors_of(algorithm, transforms):
        for tensor in named.values():
            own = tensor.detach().to("cpu", copy=True)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            copies[id(tensor)] = torch.nn.Parameter(own, tensor.requires_grad) if is_parameter else own
    return copy.deepcopy((algorithm, transforms), copies)
