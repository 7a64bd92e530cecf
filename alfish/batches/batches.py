"""What the trainer asks of a source of batches, and what the learner gets of it."""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from alfish import nest
from alfish.algorithms.contract import return_error
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Batch, Experience
from alfish.environments import Environment
from alfish.nest import Nest
from alfish.replay import RingView, SequenceIndex
from alfish.transforms import Transforms


class Minibatches(NamedTuple):
    """K minibatches, and what they are taken from."""

    source: Batch | RingView  # [T', M] rows, or those of a ring
    # [K, N] int64, of the M columns; where K minibatches' windows of a ring begin, [N] each; None: all columns are one
    index: torch.Tensor | list[SequenceIndex] | None  # type: ignore[assignment]
    is_steady: bool = True  # whether other chunks have sources like this one, so that a graph may gather by itself
    # Takes `LossInfo.priority` of the minibatches that were trained, in their order; None: nobody asks.
    update_priorities: Callable[[list[torch.Tensor]], None] | None = None

    def minibatches(self) -> Sequence[torch.Tensor | SequenceIndex | None]:
        """What `take` takes of the source for each."""
        if self.index is None:
            return [None]
        return self.index if isinstance(self.index, list) else self.index.unbind()


class Batches(abc.ABC):
    """A source of batches. The trainer calls `bind` once, `start` before a run, then `add` and `chunks` in iterations.

    Attributes:
      algorithm, transforms: that it works for; known after `bind`.
      acts: whether it is fed by environments at all.
      outlasts_acting: whether there is still something to train on once acting has ended.
      warmup_env_steps: environment steps before any of them is trained on.
      updates_per_iteration: about how many minibatches it yields for an unroll; known after `bind`.
      rows_per_update: that one of them trains; known after `bind`.
      for_graph: whether updates are graphs, which gather a minibatch faster than it can be handed to them.
    """

    on_policy: ClassVar[bool]
    acts: ClassVar[bool] = True
    outlasts_acting = False
    warmup_env_steps = 0
    updates_per_iteration = 1.0
    rows_per_update = 1
    for_graph = False

    def bind(self, algorithm: RLAlgorithm, transforms: Transforms, unroll_length: float, num_envs: int) -> None:
        """Takes what it works with; raises UsageError where the settings do not fit one another."""
        self.algorithm, self.transforms = algorithm, transforms

    def start(self, environment: Environment) -> None:
        """Reads what was recorded elsewhere, before the run's state is loaded. Default: there is nothing to read.

        Args:
          environment: that is trained for, whose spaces the data must have.
        """

    def rest(self) -> int:
        """How far the run's clock moves in this iteration without acting; 0: the trainer acts. Default: 0."""
        return 0

    def acts_at_random(self, env_steps: int) -> bool:
        """Returns True if the next unroll should act by the algorithm's `random_action`."""
        return False

    @abc.abstractmethod
    def add(self, experience: Experience) -> None:
        """Takes in an unroll of raw rows, arrays or tensors. Past it, all leaves are tensors."""

    @abc.abstractmethod
    def chunks(self, steps: int) -> Iterator[Minibatches]:
        """The batches to train on now, at `steps` on the run's clock."""

    def holdout(self) -> Batch | None:
        """Rows that are never trained on, the same ones in every call; None: there are none."""
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """Frees what others may use after the run. Default: there is nothing."""

    def stored(self) -> dict[str, Any] | None:
        """What is too large for every checkpoint, to be saved beside the newest; None: nothing."""
        return None

    def load_stored(self, stored: dict[str, Any]) -> None:
        """Continues from `stored`."""

    def _prepare(self, experience: Experience, burn_in: int = 0) -> Experience:
        """What the networks see of raw rows, preprocessed by the algorithm on whole sequences.

        Args:
          experience: `[T, N]`.
          burn_in: how many rows at the start become `Experience.burn_in`.
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
            prepared = self.algorithm.preprocess_experience(experience)
        if not isinstance(prepared, Experience):
            raise return_error(prepared, "the experience", self.algorithm, "preprocess_experience")
        return prepared


def take(source: Batch | RingView, index: Nest) -> Batch:
    """A minibatch, from one of `Minibatches.minibatches`."""
    if isinstance(source, RingView):
        return source.windows(index)
    return source if index is None else _columns(source, index)


def _columns(batch: Batch, columns: torch.Tensor) -> Batch:
    experience = batch.experience
    rows = experience._replace(state=None, policy_version=None, transform_state=None), batch.mask
    rows, mask = nest.map(lambda leaf: leaf.index_select(1, columns), rows)
    one_each = experience.state, experience.policy_version, batch.env_id, batch.position, batch.weight
    state, version, env_id, position, weight = nest.map(lambda leaf: leaf.index_select(0, columns), one_each)
    return Batch(rows._replace(state=state, policy_version=version), mask, env_id, position, weight)
