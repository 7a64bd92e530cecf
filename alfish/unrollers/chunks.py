"""The unroller of functional environments: one graph makes several vector steps of the policy and the environments."""

import functools
from collections.abc import Sequence
from typing import Any

import gin
import torch

from alfish import host, nest
from alfish.algorithms.acting import Actor, StatefulInfo, tensors_of, with_tensors
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.compiler.checked_function import CheckedFunction
from alfish.data import Ends, TimeStep
from alfish.environments.functional import FunctionalEnvironment
from alfish.errors import UsageError
from alfish.metrics.episode_sums import EpisodeSums, Finished, OpenEpisodes
from alfish.nest import Nest
from alfish.parameters import PositiveInt, checked
from alfish.transforms import Transforms
from alfish.unrollers import rollouts
from alfish.unrollers.sync import SyncUnroller


@gin.configurable(module="alfish.unrollers")
@checked
class CompiledUnroller(SyncUnroller):
    """Steps functional environments by a graph that makes `chunk_length` vector steps per call, on any device.

    The graph applies transforms, calls `rollout_step`, steps the environments and stores rows, so Python runs only once
    for `chunk_length` vector steps. Random numbers and the format of rows and checkpoints are the same as with
    `SyncUnroller`, and results are equal up to rounding. Some calls compare the graph's results with those of plain
    Python. If the algorithm's hooks or the environments cannot be compiled, or if the results differ, a warning is
    logged, and all steps run as plain Python from then on.

    Args:
      environment, algorithm, transforms: parts of the run, see `Unroller`; the environment must be functional.
      chunk_length: number of vector steps in a graph. A graph of more steps runs faster, but takes longer to compile.
      compile: whether to compile the steps; False runs the same steps as plain Python.

    Raises:
      UsageError: the environment is not functional.
    """

    def __init__(
        self,
        environment: Any,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        chunk_length: PositiveInt = 4,
        compile: bool = True,
    ):
        super().__init__(environment, algorithm, transforms, numpy_policy=None)
        if not isinstance(self.environment, FunctionalEnvironment) or not self.environment.uneven:
            raise UsageError(
                f"CompiledUnroller steps functional environments, but {environment.name} is not functional; set "
                "make_environment.env_id to a subclass of FuncEnv such as 'alfish/CartPole-v1', or bind "
                "Trainer.unroller = @SyncUnroller"
            )
        self._functional = self.environment
        self._chunk_length = chunk_length
        name = f"{chunk_length} steps of {environment.name}"
        self._run = CheckedFunction(self._chunk, name, lambda line: self.log(line))
        self._compiles, self._run.is_plain = compile, not compile
        self._known_calls = self.calls()
        self._steps_actor = Actor(algorithm, transforms)
        self._modules = algorithm, transforms

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rejected_graph": self._compiles and self._run.is_plain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state.get("rejected_graph"):  # otherwise, a new graph would be used until a comparison fails again
            self._run.is_plain = True

    def _steps_of(self, length: int, unseen: bool) -> tuple[TimeStep, Nest, Ends | None]:
        if self._at_random or self._has_to_look:
            return super()._steps_of(length, unseen)
        environment = self._functional
        if (calls := self.calls()) != self._known_calls:  # calls may change values that the graph has as constants
            self._known_calls, self._run.checks_next = calls, True
        carry = environment.episodes, self.time_step, self._state, self._transform_state, self._open_episodes(unseen)
        fixed = nest.detach(tensors_of(*self._modules)), environment.tensors(), self._initial_state
        parts = []
        for numbers in environment.draw(length).split(self._chunk_length):
            carry, part = self._run((fixed, carry, numbers))
            parts.append(part)
        environment.episodes, self.time_step, self._state, self._transform_state, open_episodes = carry
        of_rows, of_ends, of_finished = zip(*parts)
        newest: TimeStep | None = self.time_step
        if self._algorithm.on_policy:
            step, _ = self.act()
            of_rows = *of_rows, nest.map(lambda leaf: leaf[None], (self.time_step, step.output, step.info))
            newest = None
        (time_step, *others), ends, finished = map(_joined, (of_rows, of_ends, of_finished))
        if self._sums is None:
            self._record(time_step, newest, ends, unseen, [])
        else:
            self._sum(time_step, ends, finished, open_episodes)
        return time_step, others, ends

    @functools.cached_property
    def _sums(self) -> EpisodeSums | None:
        """Sums over episodes, from which metrics are computed; None if a metric needs rows."""
        return None if self.metrics is None else self.metrics.episode_sums()

    def _open_episodes(self, unseen: bool) -> OpenEpisodes | None:
        """Returns the sums of unfinished episodes for `_sums`; zeros if `unseen`; None without `_sums`."""
        if self._sums is None:
            return None
        assert self.metrics is not None
        episodes = self.metrics.open_episodes(self.time_step.step_type.device)
        return nest.map(torch.zeros_like, episodes) if unseen else episodes

    def _sum(self, rows: TimeStep, ends: Ends, finished: Finished, episodes: OpenEpisodes | None) -> None:
        """Sets `records` to the sums of an unroll, and computes `RowCheck.sign` of its rows; reads the device once."""
        assert self._sums is not None and episodes is not None
        checked = [rows, ends.time_step]
        numbers = self._sums.numbers(finished, ends.time_step.reward)
        read, signs = host.read((numbers, [self._sign(each) for each in checked]))
        self.records = self._sums.sums(read, ends.ended.numel(), episodes)
        self._signs = list(zip(checked, signs))

    @property
    def _has_to_look(self) -> bool:
        """True before the first call of `act`, in which the results of `rollout_step` are checked."""
        return self._actor.num_calls == 0

    def _chunk(self, arguments: Nest) -> Nest:
        """Makes vector steps as a function of tensors.

        Args:
          arguments: tuple of the tensors that the steps do not change, the state before the first step, and the random
            numbers `[K, B, n]` of K steps.

        Returns:
          The state after the last step, and a tuple of the rows `[K, B, ...]`, their `Ends`, and their `Finished`,
          which is None without `_sums`.
        """
        (of_modules, of_environment, initial_state), carry, numbers = arguments
        rows, ends, finished = [], [], []
        with with_tensors(of_modules, *self._modules):
            for u in numbers.unbind():
                episodes, seen, state, transform_state, open_episodes = carry
                step, transform_state = self._steps_actor.act(seen, transform_state, state, initial_state)
                episodes, last, ended, first = self._functional.advanced(of_environment, episodes, step.output, u)
                info = StatefulInfo(step.info, state) if self.stores_states else step.info
                rows.append((seen, step.output, info))
                ends.append((ended, last))
                if self._sums is not None:
                    open_episodes, found = self._sums.step(open_episodes, last.reward, ended)
                    finished.append(found)
                carry = episodes, nest.where(ended, first, last), step.state, transform_state, open_episodes
        values = nest.map(lambda *leaves: torch.stack(leaves), *finished) if finished else None
        return carry, (rollouts.stacked(rows), rollouts.ends_of(ends), values)


def _joined(parts: Sequence[Nest]) -> Nest:
    """Returns nests of rows concatenated along time."""
    return nest.map(lambda *leaves: torch.cat(leaves), *parts)
