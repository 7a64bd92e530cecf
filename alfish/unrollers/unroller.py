"""The interface of unrollers."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from alfish import nest
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import IS_STEP, Experience
from alfish.environments import EncodedEnvironment, Environment
from alfish.errors import UsageError
from alfish.metrics import Metrics
from alfish.metrics.episode_sums import StepSums
from alfish.nest import Nest
from alfish.processes.messages import EnvironmentCall
from alfish.runs.timer import Timer
from alfish.transforms import Transforms

# Names of the timed parts of an unroll, see `alfish.runs.timer.Timer`.
ENVIRONMENT, POLICY = "environment", "policy"
# Optional fields of `StepRecords`, each with the field of `TimeStep` from which it is copied.
SHOWN_FIELDS = {"observation": "observation", "action": "prev_action"}


class StepRecords(NamedTuple):
    """New rows of an unroll for metrics, in order of time."""

    step_type: np.ndarray  # [S, B]
    reward: np.ndarray  # [S, B] or [S, B, R], raw
    infos: list[tuple[int, dict[str, Any]]]  # pairs of an index into S and gymnasium's info of that step
    # The following fields, arrays `[S, B, ...]`, are set only if metrics read them, see `Unroller.shown`.
    observation: Nest = None  # raw observations
    action: Nest = None  # executed actions that led to the rows, in the algorithm's units

    @property
    def num_steps(self) -> int:
        """Number of environment steps."""
        return int(np.count_nonzero(IS_STEP.take(self.step_type)))


def without_infos(records: StepRecords) -> Any:
    """Returns the records with infos None, so that every leaf is an array."""
    return records._replace(infos=None)  # type: ignore[arg-type]


class Unroller(abc.ABC):
    """Acts with an algorithm in environments and collects raw rows.

    Args:
      environment: environments to act in, or an example of these environments.
      algorithm: algorithm whose `rollout_step` acts.
      transforms: transforms that are applied to raw rows before the algorithm receives the rows.

    Attributes:
      num_envs: number of environments.
      num_columns: number of columns of the experience that `unroll` returns, B.
      stepping: way of stepping environments, as text after the number of environments in the log ("8 environments
        in one loop"); '' if there is nothing to report.
      records: records of the last unroll for metrics, with `num_envs` columns; `StepSums` if the unroller has summed
        the rows; None if the records arrive later.
      log: function that receives lines for the user.
      check_signals: function called while waiting for other processes; raises if a signal asks to stop.
      drains: whether `unroll` ignores `length`, and returns all rows that other processes have collected.
      tolerates_errors: whether environments that fail are replaced.
      renews_columns: whether a column's row 0 may be new, in place of the last row of the previous unroll, because
        another worker collects the column.
      metrics: metrics for which the unroller may compute `episode_sums` instead of records; None if a metric needs
        rows.
      shown: names of the optional fields (`SHOWN_FIELDS`) in records; set before the first unroll.
      stores_states: whether the info of unrolls is a `StatefulInfo`, with a state for each row; set before the first
        unroll.
      policy_version: number of publications of weights.
      may_save: whether rows that were returned may be saved; False after rows that are not finite were returned.
    """

    drains = tolerates_errors = renews_columns = False
    may_save = True
    metrics: Metrics | None = None
    shown: tuple[str, ...] = ()
    stores_states = False
    unroll_length: float  # see `bind`

    def __init__(self, environment: Environment, algorithm: RLAlgorithm, transforms: Transforms):
        self.environment, self._algorithm, self._transforms = environment, algorithm, transforms
        if transforms.encoders:
            self.environment = self._encoded(environment)
        self.num_envs = self.num_columns = environment.num_envs
        self.policy_version = 0
        self.log: Callable[[str], None] = logging.warning
        self.check_signals: Callable[[], None] = lambda: None
        self.records: StepRecords | StepSums | None = None

    def _encoded(self, environment: Environment) -> Any:
        """Returns the environment with encoded observations in its rows."""
        device, encode = self._algorithm.progress.device, self._transforms.encode
        spec = self._transforms.stored_observation_spec
        return EncodedEnvironment(environment, lambda rows: encode(nest.tensors(rows, device)), spec)

    @property
    def stepping(self) -> str:
        return self.environment.stepping

    @property
    def num_steps(self) -> int:
        """Number of environment steps of the last unroll."""
        assert self.records is not None
        return self.records.num_steps

    def bind(self, make_environment: Callable[..., Environment], unroll_length: float, seed: int) -> None:
        """Sets what other processes need to build environments. Called once, before all other methods.

        Args:
          make_environment: factory of environments, called with the keywords `seed` and `num_envs`.
          unroll_length: average number of vector steps of an unroll.
          seed: seed of the run.
        """
        self.unroll_length = unroll_length

    def check_learners(self) -> None:
        """Checks that the settings suit the number of learners; called before training, not before an evaluation.

        Default: accepts all.

        Raises:
          UsageError: the settings do not suit the number of learners.
        """

    @abc.abstractmethod
    def unroll(self, length: int, at_random: bool = False) -> Experience:
        """Collects the rows of an unroll. On-policy, one more row follows, from whose value returns bootstrap.

        Leaves are numpy arrays, or tensors if the environment returns tensors.
        """

    def generate_batch(self, num_steps: int) -> Experience:
        """Returns the next rows, for programs without a trainer; see `SyncUnroller`.

        Raises:
          UsageError: this unroller collects only for a trainer.
        """
        raise self._refusal("generate_batch")

    def generate_episodes(self, num_episodes: int) -> list[Experience]:
        """Returns whole episodes, for programs without a trainer; see `SyncUnroller`.

        Raises:
          UsageError: this unroller collects only for a trainer.
        """
        raise self._refusal("generate_episodes")

    def late_records(self) -> StepRecords | None:
        """Returns the records that have not arrived yet; called at the end of a run. Default: none."""
        return None

    def publish(self) -> None:
        """Publishes weights after an iteration has changed them. Default: counts the publication."""
        self.policy_version += 1

    def ignore_infos(self) -> None:
        """Allows infos to be dropped if no metric reads them. Default: the environment stops collecting infos."""
        self.environment.ignore_infos()

    def time(self, timer: Timer) -> None:
        """Starts to measure the times of `ENVIRONMENT` and `POLICY` separately. Default: does nothing."""

    def stats(self) -> dict[str, float]:
        """Returns scalars for summaries that cover the period since the last call. Default: no scalars."""
        return {}

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `load_state_dict`."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state. Episodes that cannot continue are truncated."""

    def calls(self) -> tuple[EnvironmentCall, ...]:
        """Returns the last call of each of the environments' methods, in the order of the calls."""
        return tuple(sorted(self.environment.calls.values()))

    def calls_state(self) -> dict[str, Any]:
        """Returns the calls of the environments as an entry of `state_dict`; empty without calls."""
        made = [[one.name, list(one.arguments)] for one in self.calls()]
        return {"calls": made} if made else {}

    def repeat_calls(self, state: dict[str, Any]) -> None:
        """Repeats the calls of a state, before the first reset of the environments."""
        for name, arguments in state.get("calls", ()):
            self.environment.call(name, *arguments)

    def break_off(self) -> None:
        """Drops the current episodes, whose last step may be incomplete. Default: does nothing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes environments and processes."""

    def _refusal(self, method: str) -> UsageError:
        return UsageError(
            f"{type(self).__name__} has no {method}, because it collects only for a trainer; build a SyncUnroller"
        )
