"""What an unroller and the evaluator need of an environment."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from alfish import nest, specs
from alfish.data import TimeStep
from alfish.errors import UsageError
from alfish.nest import Array, Nest


class Environment(abc.ABC):
    """B environments that step together.

    Where finished environments reset themselves in the next step (gymnasium's NEXT_STEP), every step is one row of
    all: `step` returns LAST rows, and the next `step` FIRST rows. Elsewhere (`ragged`) an environment that finishes
    makes two rows in one step: `step` returns the LAST row, and `take_resets` the FIRST row that follows it.

    Leaves are numpy arrays on the host, or for environments that compute in torch, tensors on their device; `convert`
    makes such leaves of others. What is returned is not written later.

    Attributes:
      num_envs: B.
      observation_space, action_space: gymnasium's, of one environment.
      observation_spec, action_spec, reward_spec: see `alfish.specs`.
      ragged: see above.
      resets_rows: whether `reset` takes a mask of rows.
      seeds_rows: whether it also takes a seed a row, so that evaluation may seed every episode.
      name: of the task, for people: the id or the class that was asked for.
      env_spec: gymnasium's specification of one environment, without training wrappers; None where there is none.
      infos: gymnasium's info dict of the last reset or step.
      follows_progress: whether `set_progress` does something: a curriculum.
      broken: `[B]` bool, the environments that raised in the last step and were built anew: their episodes ended with
        the rows acted from, and the rows returned are FIRST. None: none was. See `tolerate_errors`.
      can_replace: whether there is `replace`.
    """

    ragged = False
    follows_progress = False
    can_replace = False
    broken: np.ndarray | None = None
    resets_rows = False
    seeds_rows = False
    infos: dict[str, Any]

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        num_rewards: int | None,
        first_env_id: int = 0,
    ):
        self.num_envs = num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.observation_spec = specs.observation_spec(observation_space)
        self.action_spec = specs.action_spec(action_space)
        self.reward_spec = specs.reward_spec(num_rewards)
        self.name = type(self).__name__
        self.env_spec: EnvSpec | None = None
        self.env_id: Array = np.arange(first_env_id, first_env_id + num_envs, dtype=np.int32)
        self.infos = {}

    @property
    def lacks_limit(self) -> bool:
        """Whether the specification says that an episode may last for ever. Without a specification: False."""
        spec = self.env_spec
        limits = () if spec is None else (spec.max_episode_steps, spec.kwargs.get("max_num_frames_per_episode"))
        return spec is not None and not any(limits)  # Atari's emulator counts frames

    @abc.abstractmethod
    def reset(self, seeds: Sequence[int | None] | None = None, rows: np.ndarray | None = None) -> TimeStep:
        """FIRST rows of every environment.

        Args:
          seeds: one an environment; None: at the first call those of the constructor, later ones unseeded.
          rows: `[B]` bool, reset only these; the others' rows are what they were. Where `resets_rows`.
        """

    @abc.abstractmethod
    def step(self, action: Nest) -> TimeStep:
        """Acts and returns the rows that arrive. `action` is a nest of `[B, ...]` in the algorithm's units."""

    def convert(self, rows: Nest) -> Nest:
        """Leaves of arrays or tensors as this environment takes and returns them. Default: arrays on the host."""
        if type(rows) is np.ndarray:  # the common case
            return rows
        return nest.as_array(rows) if type(rows) is torch.Tensor else nest.arrays(rows)

    def ignore_infos(self) -> None:
        """Nobody reads `infos`, which may be empty from here on. Default: nothing changes."""

    def read_executed_actions(self) -> None:
        """From here on, `prev_action` is what the environment says in its info `executed_action`, in the action space's
        own form: someone else acts, a human or an expert. Where it says nothing, it is the action that was handed in.

        Raises:
          UsageError: these environments cannot say it.
        """
        raise UsageError(f"{type(self).__name__} has no infos that could say which action was executed")

    def method(self, name: str) -> Callable[..., Any] | None:
        """A method of the environments' own class or of a wrapper, for calls that read no episode's state.

        Default: None, there is none of this name.
        """
        return None

    def set_progress(self, progress: float) -> None:
        """Where training is, in [0, 1], for environments that ask for it. Where `follows_progress`."""

    def tolerate_errors(self, report: Callable[[int, BaseException], None]) -> None:
        """From here on, an environment that raises is reported (its index and the error) and built anew.

        Default: its error is raised, as before.
        """

    def replace(self, time_step: TimeStep, rows: np.ndarray) -> TimeStep:
        """Builds the environments of these rows (`[B]` bool) anew.

        Args:
          time_step: the last one returned.

        Returns:
          The same with FIRST rows in their places.
        """
        raise NotImplementedError

    def break_off(self, time_step: TimeStep, rows: np.ndarray) -> TimeStep:
        """Truncates the episodes of these rows (`[B]` bool); the next step resets them. Default: they go on.

        Args:
          time_step: the last one returned.

        Returns:
          The same with LAST rows in their places, where an episode was under way.
        """
        return time_step

    def take_resets(self) -> tuple[Array, TimeStep] | None:
        """The FIRST rows that follow the LAST rows of this step: a mask `[B]` bool and rows `[B]`. Where `ragged`."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue: random number generators at least. Default: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continues from `state`. Whether episodes under way continue too; if not, the next `step` resets them all."""
        return False

    def abandon(self) -> None:
        """Notes that a step may be under way that never ends: from here on, there are only `state_dict`, which asks the
        environments for nothing, and `close`. Default: nothing changes."""

    def close(self) -> None:
        """Frees what the environments hold."""
