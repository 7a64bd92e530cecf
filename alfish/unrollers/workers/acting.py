"""The policies that act in workers: how the trainer holds them (`Acting`), and how workers receive them."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from alfish.algorithms.acting import changing_tensors
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.environments import Environment
from alfish.errors import UsageError
from alfish.processes.messages import Setup, Stepping
from alfish.transforms import Transforms
from alfish.unrollers.sync import refuse_on_policy
from alfish.unrollers.unroller import Unroller
from alfish.unrollers.workers.slots import ActingPolicy
from alfish.unrollers.workers.worker_process import StepWatch, WorkerUnroller


class SentPolicies(abc.ABC):
    """The policies that act in a worker, in the form in which they are pickled and sent.

    Attributes:
      kind: class of the factory's environments or games.
    """

    kind: type = Environment

    @abc.abstractmethod
    def networks(self) -> Sequence[tuple[RLAlgorithm, Transforms]]:
        """Returns the networks of all policies."""

    def changing(self) -> Sequence[tuple[RLAlgorithm, Transforms]]:
        """Returns the networks that change during a run. Default: all."""
        return self.networks()

    def tensors(self) -> list[torch.Tensor]:
        """Returns the published tensors without duplicates, in the same order in the trainer and in workers."""
        found = (tensor for networks in self.changing() for tensor in changing_tensors(*networks))
        return list({id(tensor): tensor for tensor in found}.values())

    @abc.abstractmethod
    def make_unroller(self, environment: Any, setup: Setup, watch: StepWatch) -> Any:
        """Returns the unroller of a worker.

        The unroller has three methods. `start()` resets the environment. `make_calls(calls)` makes the calls of
        listeners. `collect(length, at_random)` returns the rows and records of an unroll for each policy
        (`PolicyRows`).

        Args:
          environment: environment or games from the factory.
          setup: settings of the worker.
          watch: watch of the worker's steps.
        """


class Acting(abc.ABC):
    """The policies that act in workers, as the trainer holds them.

    Attributes:
      noun: word that messages use for an environment of a worker.
    """

    noun = "environment"

    @abc.abstractmethod
    def learning(self) -> Mapping[str, RLAlgorithm]:
        """Returns the algorithms that train, by the policy's name; '' names the only policy."""

    @abc.abstractmethod
    def policies(self, num_envs: int) -> list[ActingPolicy]:
        """Returns all policies; called when workers start.

        Args:
          num_envs: number of environments of a worker.
        """

    @abc.abstractmethod
    def sent(self) -> SentPolicies:
        """Returns the policies in the form for workers; called when workers start."""

    @abc.abstractmethod
    def whole(self, by_name: Mapping[str, Any]) -> Any:
        """Returns the results of all policies in the form in which the unroller returns them."""

    def ignore_infos(self) -> None:
        """Allows infos to be dropped. Default: does nothing, because each policy has its own setting."""

    @property
    def learns_on_policy(self) -> bool:
        """True if at least one of the policies that train is on-policy."""
        return any(algorithm.on_policy for algorithm in self.learning().values())

    def check(self, stepping: Stepping, lockstep: bool) -> None:
        """Checks settings of the unroller.

        Args:
          stepping: settings of stepping.
          lockstep: whether an unroll has one segment of each worker.

        Raises:
          UsageError: the settings do not suit the policies, or an algorithm cannot learn from segments of workers.
        """
        for name, algorithm in self.learning().items():
            kind = type(algorithm).__name__ + (f" of the policy {name}" if name else "")
            if algorithm.on_policy and not algorithm.unroll_use.handles_stale_policies:
                raise UsageError(
                    f"{kind} is on-policy and does not correct for rows of older policies, which AsyncUnroller "
                    "returns; train with APPO, or bind Trainer.unroller = @SyncUnroller"
                )
            if self.learns_on_policy and not lockstep and not algorithm.on_policy and algorithm.has_state:
                raise UsageError(
                    f"{kind} is off-policy and has a memory, for which an unroll must have one segment of each worker, "
                    "and another policy is on-policy; bind AsyncUnroller.mode = 'lockstep'"
                )


class OnePolicy(Acting):
    """The only policy of a run.

    Args:
      unroller: unroller of the policy; determines the fields of rows and records.
      algorithm, transforms: networks of the policy.
    """

    def __init__(self, unroller: Unroller, algorithm: RLAlgorithm, transforms: Transforms):
        self._unroller, self._algorithm, self._transforms = unroller, algorithm, transforms
        self._keeps_infos = True

    def ignore_infos(self) -> None:
        self._keeps_infos = False

    def learning(self) -> Mapping[str, RLAlgorithm]:
        return {"": self._algorithm}

    def policies(self, num_envs: int) -> list[ActingPolicy]:
        unroller = self._unroller
        own = unroller.environment, self._algorithm, self._transforms, num_envs
        return [ActingPolicy("", *own, shown=unroller.shown, stores_states=unroller.stores_states)]

    def check(self, stepping: Stepping, lockstep: bool) -> None:
        super().check(stepping, lockstep)
        if stepping.overwrites:
            refuse_on_policy(self._algorithm)
        environment = self._unroller.environment
        if stepping.stagger and not environment.can_break_off:
            raise UsageError(
                f"AsyncUnroller.stagger is {stepping.stagger}, but the environments of {environment.name} are not "
                "stepped one by one, so their first episodes cannot be truncated; leave stagger out"
            )

    def sent(self) -> SentPolicies:
        shown, stores_states = self._unroller.shown, self._unroller.stores_states
        return SentPolicy(self._algorithm, self._transforms, shown, stores_states, self._keeps_infos)

    def whole(self, by_name: Mapping[str, Any]) -> Any:
        return by_name[""]


class SentPolicy(SentPolicies):
    """The only policy of a run, and the fields of its rows and records.

    Args:
      algorithm, transforms: networks of the policy.
      shown, stores_states: settings of the unroller, see `Unroller`.
      keeps_infos: whether records have infos.
    """

    def __init__(
        self,
        algorithm: RLAlgorithm,
        transforms: Transforms,
        shown: tuple[str, ...],
        stores_states: bool,
        keeps_infos: bool,
    ):
        self._networks = algorithm, transforms
        self._shown, self._stores_states, self._keeps_infos = shown, stores_states, keeps_infos

    def networks(self) -> Sequence[tuple[RLAlgorithm, Transforms]]:
        return [self._networks]

    def make_unroller(self, environment: Any, setup: Setup, watch: StepWatch) -> WorkerUnroller:
        environment.env_id += setup.first_env_id
        stepping = setup.plan.stepping
        settings = stepping.numpy_policy, stepping.overwrites
        unroller = WorkerUnroller(environment, *self._networks, *settings, watch=watch, starts=setup.starts)
        unroller.shown, unroller.stores_states = self._shown, self._stores_states
        if not self._keeps_infos:
            unroller.ignore_infos()
        return unroller
