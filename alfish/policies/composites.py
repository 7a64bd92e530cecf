"""Networks, batches, learners and metrics of several policies, with the same interfaces as for a single policy.

The training loop uses these composites like the parts of a single policy. Each policy acts and trains with its own
random numbers. A policy whose columns no other policy affects therefore has bitwise the same results as in a separate
run.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import gymnasium
import torch
from torch import nn

from alfish import specs
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import Experience
from alfish.environments.games import Games
from alfish.errors import UsageError
from alfish.policies.member import Member
from alfish.processes.messages import EnvironmentCall
from alfish.transforms import Transforms
from alfish.unrollers.unroller import StepRecords


class Named(Protocol):
    """Interface of an object that has the name and the networks of a policy."""

    name: str
    algorithm: RLAlgorithm
    transforms: Transforms


class GamesByPolicy:
    """Games in the form of an environment for several policies, with spaces for each policy.

    Args:
      games: games that the policies play.
      groups: group of each policy's agents, by the policy's name.

    Attributes:
      games: the constructor's argument.
      observation_space, action_space: Dicts of the spaces of an agent, by policy.
      reward_spec: spec of a reward with an entry for each policy, as in evaluations.
      name, num_envs, stepping, remark, env_spec: attributes as in `Environment`.
    """

    lacks_limit = False
    calls: Mapping[str, EnvironmentCall] = {}  # listeners cannot call games

    def __init__(self, games: Games, groups: Mapping[str, Any]):
        self.games = games
        self.name = games.name
        self.num_envs = games.num_games
        self.stepping = games.stepping
        self.remark = games.remark
        self.env_spec = games.env_spec
        self._is_closed = False
        self.observation_space = gymnasium.spaces.Dict({name: one.observation_space for name, one in groups.items()})
        self.action_space = gymnasium.spaces.Dict({name: one.action_space for name, one in groups.items()})
        self.reward_spec = specs.reward_spec(list(groups))

    def call(self, name: str, *arguments: Any) -> None:
        """Raises UsageError, because listeners cannot call games."""
        raise UsageError(
            f"{self.name} is a game, so listeners cannot call its method {name!r}; for a curriculum, define "
            "set_progress(progress) in the game"
        )

    @property
    def observation_spec(self) -> Any:
        """Refuses unrollers for a single policy, which read this property.

        Raises:
          UsageError: always.
        """
        raise UsageError(
            "Trainer.unroller collects for a single policy; with several policies bind Trainer.unroller = "
            "@AsyncUnroller, or leave it out"
        )

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.games.close()


class Policies(nn.Module):
    """The algorithms of all policies, as submodules named after the policies.

    Args:
      members: policies, each with a `name` and an `algorithm`.
      progress: progress of the run, which all algorithms share.
    """

    reward_weights = None
    on_policy = False
    progress: torch.Tensor

    def __init__(self, members: Sequence[Named], progress: torch.Tensor):
        super().__init__()
        self.register_buffer("progress", progress)
        for member in members:
            self.add_module(member.name, member.algorithm)

    @property
    def algorithms(self) -> list[RLAlgorithm]:
        return [one for one in self.children() if isinstance(one, RLAlgorithm)]

    def tell_progress(self, number: float) -> None:
        for algorithm in self.algorithms:
            algorithm.tell_progress(number)

    def progress_number(self) -> float:
        return self.algorithms[0].progress_number()


class JointTransforms(nn.Module):
    """The transforms of all policies, as submodules named after the policies.

    Args:
      members: policies, each with a `name` and `transforms`.
    """

    encoders: Collection[Any] = ()
    raw_reward_spec = specs.reward_spec()

    def __init__(self, members: Sequence[Named]):
        super().__init__()
        self._members = members
        for member in members:
            self.add_module(member.name, member.transforms)

    def __len__(self) -> int:
        return sum(len(member.transforms) for member in self._members)

    @property
    def keep_statistics(self) -> bool:
        return any(member.transforms.keep_statistics for member in self._members)

    def sources(self) -> dict[str, str]:
        return {
            f"{member.name}.{place}": source
            for member in self._members
            for place, source in member.transforms.sources().items()
        }


class JointBatches:
    """The batches of all policies. The clock of each source counts the environment steps of the source's policy."""

    acts = True
    few_rows = ""

    def __init__(self, members: Sequence[Member]):
        self._members = members

    @property
    def warmup_env_steps(self) -> int:
        return max(one.batches.warmup_env_steps for one in self._trained())

    @property
    def needed_env_steps(self) -> int:
        return max(one.batches.needed_env_steps for one in self._trained())

    def start(self, environment: GamesByPolicy) -> None:
        """Starts the batch sources of the policies that train; a source may read recorded data."""
        for member in self._trained():
            member.start()

    def rest(self) -> int:
        return 0

    def resume_without_rows(self, steps: int) -> int | None:
        """Continues without rows of replay; see `Batches.resume_without_rows`. Each policy counts its own steps."""
        needed = [one.batches.resume_without_rows(one.num_steps) for one in self._trained()]
        return max((num_steps for num_steps in needed if num_steps is not None), default=None)

    def updates_until(self, steps: int) -> float:
        total = sum(one.steps_per_step for one in self._trained())
        return sum(one.batches.updates_until(int(steps * one.steps_per_step / total)) for one in self._trained())

    def acts_at_random(self, env_steps: int) -> list[str]:
        """Returns the names of the policies that act at random in the next unroll."""
        trained = [one for one in self._trained() if one.is_training]
        return [one.name for one in trained if one.batches.acts_at_random(one.num_steps)]

    def add(self, experience: Mapping[str, Experience]) -> None:
        for member in self._trained():
            # If a policy does not train now, replay stores its rows nevertheless, so that episodes have no gaps.
            # On-policy, its unroll is dropped.
            if member.is_training or not member.algorithm.on_policy:
                with member.stream:
                    member.batches.add(experience[member.name])

    def chunks(self, steps: int, for_graph: bool = False) -> Iterator[tuple[Member, Iterator[Any]]]:
        """Yields each policy that trains now, with its minibatches."""
        for member in [one for one in self._trained() if one.is_training]:
            yield member, member.batches.chunks(member.num_steps, not member.learner.is_plain)

    def holdout(self) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {member.name: member.batches.state_dict() for member in self._members}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for member in self._members:
            member.batches.load_state_dict(state[member.name])

    def stored(self) -> dict[str, Any] | None:
        rows = {member.name: member.batches.stored() for member in self._trained()}
        return {name: own for name, own in rows.items() if own is not None} or None

    def load_stored(self, stored: dict[str, Any]) -> None:
        for member in self._members:
            if member.name in stored:
                member.batches.load_stored(stored[member.name])

    def close(self) -> None:
        for member in self._members:
            member.batches.close()

    def _trained(self) -> list[Member]:
        return [member for member in self._members if member.trains]


class JointLearner:
    """The learners of all policies, which train one after another."""

    is_plain, is_small = True, False

    def __init__(self, members: Sequence[Member]):
        self._members = members
        self._log: Callable[[str], Any] | None = None

    @property
    def log(self) -> Callable[[str], Any] | None:
        return self._log

    @log.setter
    def log(self, log: Callable[[str], Any]) -> None:
        self._log = log
        for member in self._members:
            member.learner.log = lambda line, name=member.name: log(f"{name}: {line}")  # type: ignore[misc]

    @property
    def updates(self) -> int:
        """Number of updates of all policies."""
        return sum(member.learner.updates for member in self._members)

    @property
    def is_switching(self) -> bool:
        return any(member.learner.is_switching for member in self._members)

    def switch(self, waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext) -> None:
        for member in self._members:
            if member.learner.is_switching:
                with member.stream:
                    member.learner.switch(waiting)

    def restore_buffers(self) -> None:
        for member in self._members:
            member.learner.restore_buffers()

    def train(self, chunks: Any, summarize: bool = True) -> dict[str, float]:
        """Makes the updates of each policy; returns scalars with names such as `NAME/loss`."""
        scalars: dict[str, float] = {}
        for member, own in chunks:
            with member.stream:
                learned = member.learner.train(own, summarize)
            scalars |= _named(member, learned)
        return scalars

    def unreported(self) -> dict[str, float]:
        scalars: dict[str, float] = {}
        for member in self._members:
            scalars |= _named(member, member.learner.unreported())
        return scalars

    def close(self) -> None:
        for member in self._members:
            member.learner.close()

    def state_dict(self) -> dict[str, Any]:
        own = {member.name: member.learner.state_dict() for member in self._members if member.trains}
        return {"updates": self.updates, "policies": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for member in self._members:
            if member.name in state["policies"]:
                member.learner.load_state_dict(state["policies"][member.name])


class JointModes:
    """Switches the algorithms of all policies between acting and training, like `ModeSwitch`."""

    def __init__(self, members: Sequence[Member]):
        self._members = members

    def switch(self, training: bool) -> None:
        for member in self._members:
            member.modes.switch(training)


class JointMetrics:
    """The metrics of all policies; results have names such as `NAME/average_return`."""

    reads: tuple[str, ...] = ()

    def __init__(self, members: Sequence[Member]):
        self._members = members

    @property
    def names(self) -> tuple[str, ...]:
        return self._members[0].metrics.names

    def update(self, *records: StepRecords) -> None:
        """Adds the records of an unroll, one for each policy."""
        for member, own in zip(self._members, records, strict=True):
            member.metrics.update(*own)

    def results(self) -> dict[str, float]:
        scalars: dict[str, float] = {}
        for member in self._members:
            scalars |= _named(member, member.metrics.results())
        return scalars

    def state_dict(self) -> dict[str, Any]:
        return {member.name: member.metrics.state_dict() for member in self._members}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for member in self._members:
            member.metrics.load_state_dict(state[member.name])


def _named(member: Member, scalars: Mapping[str, float]) -> dict[str, float]:
    return {f"{member.name}/{name}": value for name, value in scalars.items()}
