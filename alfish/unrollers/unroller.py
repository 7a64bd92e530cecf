"""What the trainer needs of an unroller."""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.runs.timer import Timer
from alfish.transforms import Transforms

# Parts of an unroll, see `alfish.runs.timer.Timer`.
ENVIRONMENT, POLICY = "environment", "policy"
# The fields of `StepRecords` that metrics may ask for, and those of `TimeStep` that they are.
SHOWN_FIELDS = {"observation": "observation", "action": "prev_action"}


class StepRecords(NamedTuple):
    """What metrics need of the rows that an unroll was the first to see, in the order they arrived."""

    step_type: np.ndarray  # [S, B]
    reward: np.ndarray  # [S, B] or [S, B, R], raw
    infos: list[tuple[int, dict[str, Any]]]  # index into S, and gymnasium's info of that step
    # Only where metrics read them, see `Unroller.shown`; arrays `[S, B, ...]`.
    observation: Nest = None  # raw
    action: Nest = None  # executed on the way to the row, in the algorithm's units


def without_infos(records: StepRecords) -> Any:
    """What of records are arrays."""
    return records._replace(infos=None)  # type: ignore[arg-type]


class Unroller(abc.ABC):
    """Acts with an algorithm in environments and keeps what happened, raw, as rows.

    Args:
      environment: what to act in, or one like those that will be acted in.
      algorithm: whose `rollout_step` acts.
      transforms: what the algorithm sees of a raw row.

    Attributes:
      num_envs: environments in all.
      num_columns: B of the experience that `unroll` returns.
      records: of the last unroll, for metrics, `num_envs` columns.
      log: takes a line for the user.
      check_signals: called during a wait for other processes; raises where a signal asks to stop.
      drains: whether `unroll` hands over what others have collected, whatever length it is asked for.
      shown: which of `SHOWN_FIELDS` records hold; whoever reads them sets it before the first unroll.
      policy_version: how often weights were published.
    """

    drains = False
    shown: tuple[str, ...] = ()
    unroll_length: float  # see `bind`

    def __init__(self, environment: Environment, algorithm: RLAlgorithm, transforms: Transforms):
        self.environment, self._algorithm, self._transforms = environment, algorithm, transforms
        self.num_envs = self.num_columns = environment.num_envs
        self.policy_version = 0
        self.log: Callable[[str], None] = logging.warning
        self.check_signals: Callable[[], None] = lambda: None
        self.records: StepRecords | None = None

    def bind(self, make_environment: Callable[..., Environment], unroll_length: float, seed: int) -> None:
        """Tells it once, before anything else, what it needs to build environments elsewhere.

        Args:
          make_environment: takes the keywords `seed` and `num_envs`.
          unroll_length: what `unroll` will be asked for, on average.
          seed: of the run.
        """
        self.unroll_length = unroll_length

    @abc.abstractmethod
    def unroll(self, length: int, at_random: bool = False) -> Experience:
        """Rows of experience, on-policy with one more row for its value.

        Leaves are arrays on the host; of environments that give tensors, tensors.
        """

    def generate_batch(self, num_steps: int) -> Experience:
        """The next rows, for a program without a trainer; see `SyncUnroller`.

        Raises:
          UsageError: this unroller collects for a trainer, at a pace of its own.
        """
        raise self._refusal("generate_batch")

    def generate_episodes(self, num_episodes: int) -> list[Experience]:
        """Whole episodes, for a program without a trainer; see `SyncUnroller`.

        Raises:
          UsageError: this unroller collects for a trainer, at a pace of its own.
        """
        raise self._refusal("generate_episodes")

    def publish(self) -> None:
        """Notes that an iteration is over: parameters and buffers have changed."""
        self.policy_version += 1

    def ignore_infos(self) -> None:
        """Notes that no metric reads infos. Default: the environment does not gather them."""
        self.environment.ignore_infos()

    def time(self, timer: Timer) -> None:
        """Counts `ENVIRONMENT` and `POLICY` as parts of their own from now on. Default: they are not told apart."""

    def stats(self) -> dict[str, float]:
        """Scalars for summaries, since the call before. Default: none."""
        return {}

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` continues from."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues. Episodes that cannot be continued end here, truncated."""

    def break_off(self) -> None:
        """Forgets the episodes under way, whose step may never have come to an end. Default: none are kept."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees environments and processes."""

    def _refusal(self, method: str) -> UsageError:
        return UsageError(
            f"{type(self).__name__} has no {method}: it collects for a trainer, at a pace of its own; build a "
            "SyncUnroller"
        )
