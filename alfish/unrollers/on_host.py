"""The unroller that acts on the CPU while a GPU trains."""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import gin
import torch

from alfish import host, nest
from alfish.algorithms.acting import ModeSwitch, changing_tensors
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience
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
      values: function that waits for the values and returns them as bytes, see `host.Mirror`.
    """

    version: int
    indices: list[int]
    values: Callable[[], torch.Tensor]


@gin.configurable(module="alfish.unrollers")
@checked
class HostUnroller(SyncUnroller):
    """`SyncUnroller` that acts on the CPU, with a copy of the policy, while the algorithm trains on a GPU.

    Launching a small policy on a GPU takes longer than computing its actions in numpy, and each action waits for all
    updates before it. At the start of each unroll, the tensors that the policy reads are copied from the GPU. With a
    lag of 1, the unroll does not wait for this copy: it acts with the tensors that were copied at the start of the
    previous unroll, so environments step while the GPU updates. The lag is a fixed number of unrolls, not a time, so
    a seed gives the same bits in each run.

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
        self._trained = changing_tensors(algorithm, transforms)
        own_algorithm, own_transforms = copy.deepcopy(algorithm).to("cpu"), copy.deepcopy(transforms).to("cpu")
        ModeSwitch(own_algorithm).switch(training=False)
        super().__init__(environment, own_algorithm, own_transforms, numpy_policy, overwrite_policy_output)
        device = nest.tensors(environment.convert(torch.zeros(1))).device
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
        self._own = changing_tensors(own_algorithm, own_transforms)
        assert [tensor.shape for tensor in self._own] == [tensor.shape for tensor in self._trained]
        self._lag = int(not algorithm.on_policy) if lag is None else lag
        self._weights: deque[Weights] = deque()  # of this unroll and the `lag` unrolls before it
        self._acting_version = 0
        self._sources: list[torch.Tensor] | None = []  # `PolicyRunner.sources` for which `_reader` was made
        self._read: list[int] = []  # indices of the tensors of `_reader`
        self._written: list[int] = []  # indices of the tensors of `_memory`
        self._reader: host.PackedReader
        self._memory: host.PackedMemory

    def state_dict(self) -> dict[str, Any]:
        waiting = [(one.version, one.indices, one.values()) for one in self._weights]
        return {**super().state_dict(), "weights": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._weights = deque(
            Weights(version, indices, lambda values=values: values)  # type: ignore[misc]
            for version, indices, values in state.get("weights", ())
        )

    def _refresh(self) -> None:
        """Reads the weights for later unrolls, and acts with those of `lag` unrolls ago, or else with the oldest."""
        self._begin_to_read()
        while self._actor.gave_up and len(self._weights[0].indices) < len(self._read):
            self._weights.popleft()  # torch may read tensors that these weights lack
        oldest = self._weights[0]
        if len(self._weights) > self._lag:
            self._weights.popleft()
        if oldest.indices != self._written:
            self._written = oldest.indices
            self._memory = host.PackedMemory([self._own[index] for index in oldest.indices])
        self._memory.write(oldest.values())
        self._acting_version = oldest.version
        super()._refresh()

    def _begin_to_read(self) -> None:
        """Begins to copy the tensors that acting reads, with the progress, which environments may read."""
        sources = self._actor.sources
        if sources is not self._sources:
            self._sources = sources
            wanted = {id(tensor) for tensor in (*(sources or self._own), self._algorithm.progress)}
            self._read = [index for index, tensor in enumerate(self._own) if id(tensor) in wanted]
            self._reader = host.PackedReader([self._trained[index] for index in self._read])
        self._weights.append(Weights(self.policy_version, self._read, self._reader.read_later()))

    def _finish(self, *arguments: Any) -> Experience:
        version = self.environment.convert(self._ones * self._acting_version)
        return super()._finish(*arguments)._replace(policy_version=version)
