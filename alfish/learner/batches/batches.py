"""`Batches`, the interface of a source of batches, and `Minibatches`, the rows that a source gives to the learner."""

import abc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from alfish import nest
from alfish.algorithms.contract import return_error
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Batch, Experience
from alfish.environments import Environment
from alfish.nest import Nest
from alfish.replay import ReplayView, SequenceIndex
from alfish.transforms import Transforms


class Minibatches(NamedTuple):
    """K minibatches: rows, and the indices of each minibatch in these rows.

    Attributes:
      source: rows `[T', M]`, or a view of a ring's rows.
      index: indices of the minibatches: columns of `source`, `[K, N]` int64; or, for a ring, a list of K indices of N
        windows each. None means one minibatch of all rows.
      is_steady: whether the leaves of `source` have the same shapes in every chunk, so that one graph can gather all
        minibatches.
      update_priorities: function that is called with the priorities of windows, `[N]` for each trained minibatch, in
        order; None means that priorities are not used.
    """

    source: Batch | ReplayView
    index: torch.Tensor | list[SequenceIndex] | None  # type: ignore[assignment]
    is_steady: bool = True
    update_priorities: Callable[[list[torch.Tensor]], None] | None = None

    def minibatches(self) -> Sequence[torch.Tensor | SequenceIndex | None]:
        """Returns the index of each minibatch, as `take` expects it."""
        if self.index is None:
            return [None]
        return self.index if isinstance(self.index, list) else self.index.unbind()


class Batches(abc.ABC):
    """A source of batches.

    The trainer calls `plan` and `bind` once, `start` before a run, then `add` and `chunks` in each iteration.

    Attributes:
      on_policy: whether training is on-policy, on the rows of the last unrolls.
      algorithm, transforms: the arguments of `bind`.
      acts: whether the source trains on rows that the run collects.
      stores_states: whether unrolls must store the recurrent state of each row (`StatefulInfo`); known after `bind`.
      outlasts_acting: whether training can continue after the run has stopped collecting rows.
      warmup_env_steps: number of environment steps before the first update; known after `plan`.
      needed_env_steps: number of environment steps without which no batch can be made; known after `bind`.
      updates_per_iteration: mean number of minibatches per unroll; known after `bind`.
      rows_per_update: number of rows in a minibatch, without the last row of each window, which does not train; known
        after `bind`.
    """

    on_policy: ClassVar[bool]
    acts: ClassVar[bool] = True
    stores_states = False
    outlasts_acting = False
    warmup_env_steps = 0
    updates_per_iteration = 1.0
    needed_env_steps = 0
    rows_per_update = 1

    def plan(self, num_env_steps: float) -> None:
        """Sets attributes that depend on the length of the run. Default: does nothing.

        Args:
          num_env_steps: number of environment steps of all learners that the budget allows; inf if the budget does not
            limit steps.
        """

    def bind(self, algorithm: RLAlgorithm, transforms: Transforms, unroll_length: float, num_envs: int) -> None:
        """Connects the source to the other parts of a run.

        Args:
          algorithm: algorithm that trains on the batches.
          transforms: transforms of raw rows, applied before the algorithm sees the rows.
          unroll_length: number of vector steps of an unroll; below 1 if some off-policy iterations take no step.
          num_envs: number of environments, the columns of an unroll.

        Raises:
          UsageError: the settings are inconsistent.
        """
        self.algorithm, self.transforms = algorithm, transforms

    def start(self, environment: Environment) -> None:
        """Reads recorded data, before the run's state is loaded. Default: does nothing.

        Args:
          environment: environment to train for; the data must have its spaces.
        """

    def rest(self) -> int:
        """Returns the number of updates of the next iteration if it makes only offline updates.

        Each of these updates counts as a step of the run's clock. 0 means that the next iteration steps environments.
        """
        return 0

    def acts_at_random(self, env_steps: int) -> bool:
        """Returns whether the next unroll uses the algorithm's `random_action`."""
        return False

    def resume_without_rows(self, steps: int) -> int | None:
        """Prepares a run without its saved replay rows to collect rows before training. Default: does nothing.

        Args:
          steps: clock steps of the run.

        Returns:
          Number of environment steps to take before training continues; None without a replay.
        """
        return None

    def updates_until(self, steps: int) -> float:
        """Returns the number of updates until the run's clock reaches `steps`. Default: inf, which means unknown.

        Args:
          steps: clock steps at the end of an iteration.
        """
        return math.inf

    @property
    def few_rows(self) -> str:
        """Warning that an unroll has too few rows for the updates on it; empty if it has enough rows."""
        return ""

    @abc.abstractmethod
    def add(self, experience: Experience) -> None:
        """Adds an unroll of raw rows, which transforms have not changed yet. Its leaves are arrays or tensors."""

    @abc.abstractmethod
    def chunks(self, steps: int, for_graph: bool = False) -> Iterator[Minibatches]:
        """Yields the minibatches to train on in this iteration.

        Args:
          steps: clock steps of the run.
          for_graph: whether updates are compiled; the source may then yield a view of a ring, from which a graph
            gathers minibatches.
        """

    def holdout(self) -> Batch | None:
        """Returns rows that are never trained on, the same in every call; None without such rows."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that every checkpoint contains. Default: an empty dict."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`. Default: does nothing."""

    def close(self) -> None:
        """Releases resources, e.g. a lock, after the run. Default: does nothing."""

    def stored(self) -> dict[str, Any] | None:
        """Returns state that only the newest checkpoint contains, because it is large; None without such state."""
        return None

    def load_stored(self, stored: dict[str, Any]) -> None:
        """Restores the result of `stored`."""

    def take_over(self, other: "Batches") -> None:
        """Takes the state and the rows of another source of the same class, which must not be used afterwards."""
        self.load_state_dict(other.state_dict())
        if (stored := other.stored()) is not None:
            self.load_stored(stored)

    def _prepare(self, experience: Experience, burn_in: int = 0, hook: str = "preprocess_experience") -> Experience:
        """Applies the transforms to rows, and calls a hook of the algorithm with whole sequences.

        Args:
          experience: rows `[T, N]`.
          burn_in: number of leading rows that become `Experience.burn_in`.
          hook: name of the hook.
        """
        with torch.no_grad():
            seen = self.transforms.transform(experience.time_step, experience.transform_state)
            experience = experience._replace(time_step=seen)
            if burn_in:
                warming, seen = nest.split(seen, burn_in)
                rest = experience.action, experience.info, experience.return_to_go
                action, info, return_to_go = nest.at(rest, slice(burn_in, None))
                experience = Experience(
                    seen, action, info, experience.state, burn_in=warming, return_to_go=return_to_go
                )
            prepared = getattr(self.algorithm, hook)(experience)
        if not isinstance(prepared, Experience):
            raise return_error(prepared, "the experience", self.algorithm, hook)
        return prepared


def take(source: Batch | ReplayView, index: Nest) -> Batch:
    """Returns a minibatch of `source`; `index` is an entry of `Minibatches.minibatches`."""
    if not isinstance(source, Batch):
        return source.windows(index)
    return source if index is None else _columns(source, index)


def _columns(batch: Batch, columns: torch.Tensor) -> Batch:
    experience = batch.experience
    rows = experience._replace(state=None, policy_version=None, transform_state=None), batch.mask
    rows, mask = nest.map(lambda leaf: leaf.index_select(1, columns), rows)
    one_each = experience.state, experience.policy_version, batch.env_id, batch.position, batch.weight
    state, version, env_id, position, weight = nest.map(lambda leaf: leaf.index_select(0, columns), one_each)
    return Batch(rows._replace(state=state, policy_version=version), mask, env_id, position, weight)
