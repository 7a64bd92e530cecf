"""Several policies that act in workers: how the trainer holds and sends them, and their unroller in a worker."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.data import TimeStep
from alfish.environments.games import Games
from alfish.errors import RunError, UsageError
from alfish.nest import Nest
from alfish.policies.composites import GamesByPolicy, JointTransforms, Policies
from alfish.policies.game_unroller import GameUnroller
from alfish.policies.lineup import Lineup
from alfish.policies.member import Member
from alfish.policies.seat import Seat
from alfish.processes.messages import EnvironmentCall, Setup, Stepping, seed_of
from alfish.processes.shared_memory import Heartbeat
from alfish.runs.random_state import RandomStream
from alfish.transforms import Transforms
from alfish.unrollers.workers.acting import Acting, SentPolicies
from alfish.unrollers.workers.slots import ActingPolicy, PolicyRows
from alfish.unrollers.workers.worker_process import EnvironmentFailure, StepWatch


class SentMember(NamedTuple):
    """A policy in the form in which a worker receives it.

    Attributes:
      name, trains: attributes of the `Member`.
      seed: seed of the policy's random numbers.
      changes: whether the policy's networks change during a run.
      algorithm, transforms: networks of the policy.
      shown, stores_states: settings of the policy's seat, see `Unroller`.
      keeps_infos: whether the policy's records have infos.
    """

    name: str
    seed: int
    trains: bool
    changes: bool
    algorithm: RLAlgorithm
    transforms: Transforms
    shown: tuple[str, ...]
    stores_states: bool
    keeps_infos: bool


class SeveralPolicies(Acting):
    """The policies of a run with several policies, as the trainer holds them.

    Args:
      lineup: lineup of the policies.
      members: policies.
      num_games: number of games that the policies were built for.
    """

    noun = "game"

    def __init__(self, lineup: Lineup, members: Sequence[Member], num_games: int):
        self._lineup, self._members, self._num_games = lineup, members, num_games

    def learning(self) -> Mapping[str, RLAlgorithm]:
        return {member.name: member.algorithm for member in self._members if member.trains}

    def policies(self, num_envs: int) -> list[ActingPolicy]:
        found = []
        for member in self._members:
            seat = member.seat
            own = member.algorithm, member.transforms, seat.num_envs * num_envs // self._num_games, member.trains
            found.append(ActingPolicy(member.name, seat.environment, *own, seat.shown, seat.stores_states))
        return found

    def sent(self) -> SentPolicies:
        return SentSeveral(
            self._lineup,
            [
                SentMember(
                    member.name,
                    member.stream.seed,
                    member.trains,
                    member.trains or member.snapshot_of is not None,
                    member.algorithm,
                    member.transforms,
                    member.seat.shown,
                    member.seat.stores_states,
                    member.metrics.reads_infos,
                )
                for member in self._members
            ],
        )

    def whole(self, by_name: Mapping[str, Any]) -> Any:
        return by_name

    def check(self, stepping: Stepping, lockstep: bool) -> None:
        super().check(stepping, lockstep)
        for name, value in (("overwrite_policy_output", stepping.overwrites), ("stagger", stepping.stagger)):
            if value:
                raise UsageError(f"AsyncUnroller.{name} is for a single policy; with several policies leave it out")


class SentSeveral(SentPolicies):
    """Several policies and their lineup, in the form in which they are sent to workers.

    Args:
      lineup: lineup of the policies.
      members: policies, in the lineup's order.
    """

    kind = Games

    def __init__(self, lineup: Lineup, members: Sequence[SentMember]):
        self._lineup, self._members = lineup, members

    def networks(self) -> Sequence[tuple[RLAlgorithm, Transforms]]:
        return [(member.algorithm, member.transforms) for member in self._members]

    def changing(self) -> Sequence[tuple[RLAlgorithm, Transforms]]:
        """Returns the networks of the policies that train, and of their snapshots."""
        return [(member.algorithm, member.transforms) for member in self._members if member.changes]

    def make_unroller(self, environment: Games, setup: Setup, watch: StepWatch) -> "JointWorkerUnroller":
        worker, generation = setup.process
        lineup = self._lineup.of_worker(environment, setup.first_env_id, generation)
        players = [WorkerPlayer(member, environment, lineup, setup) for member in self._members]
        by_policy = GamesByPolicy(
            environment, {one.name: environment.groups[lineup.group[one.name]] for one in players}
        )
        networks = Policies(players, self._members[0].algorithm.progress), JointTransforms(players)
        return JointWorkerUnroller(by_policy, *networks, lineup, players, watch=watch, first_game=setup.first_env_id)


class WorkerPlayer:
    """A policy that acts in a worker.

    Args:
      member: policy that the worker received.
      games: games of the worker.
      lineup: lineup of the games.
      setup: settings of the worker.

    Attributes:
      name, trains, algorithm, transforms: attributes of `member`.
      seat: seat of the policy; its random numbers are derived from the seed of the policy and the process.
    """

    def __init__(self, member: SentMember, games: Games, lineup: Lineup, setup: Setup):
        self.name, self.trains = member.name, member.trains
        self.algorithm, self.transforms = member.algorithm, member.transforms
        group, columns = games.groups[lineup.group[member.name]], lineup.columns[member.name]
        stream = RandomStream(seed_of(member.seed, *setup.process), torch.device("cpu"))
        has_gaps = games.has_gaps or not lineup.is_fixed
        with stream:
            own = games, group, columns, member.algorithm, member.transforms, stream, has_gaps
            first = len(columns) * setup.process[0]
            self.seat = Seat(*own, first_env_id=first, numpy_policy=setup.plan.stepping.numpy_policy)
        self.seat.shown, self.seat.stores_states = member.shown, member.stores_states
        if not member.keeps_infos:
            self.seat.ignore_infos()


class JointWorkerUnroller(GameUnroller):
    """`GameUnroller` that reports its activity, and builds failed games again.

    Args:
      arguments: arguments of `GameUnroller`; players are `WorkerPlayer`s.
      watch: watch of the worker's steps.
      first_game: number of the first game among the games of all workers.
    """

    def __init__(self, *arguments: Any, watch: StepWatch, first_game: int):
        super().__init__(*arguments)
        self._watch, self._first_game = watch, first_game
        if watch.tolerate is not None:
            self.games.tolerate_errors(self._report)

    def collect(self, length: int, at_random: Sequence[str]) -> list[PolicyRows]:
        """Returns the records of each policy, and the rows if the policy trains; see `SentPolicies.make_unroller`."""
        try:
            found = self.unroll(length, at_random or ())
        except RunError as error:  # games with a row that is not finite cannot be built again
            raise EnvironmentFailure from error
        assert self.records is not None
        return [(found[one.name] if one.trains else None, self.records[one.name]) for one in self._players]  # type: ignore[attr-defined]

    def make_calls(self, calls: Sequence[EnvironmentCall]) -> None:
        """Does nothing, because listeners cannot call games; see `GamesByPolicy.call`."""

    def _report(self, game: int, error: BaseException) -> None:
        self._watch.report(self._first_game + game, error, self.games.name)

    def _reset_games(self) -> dict[str, TimeStep]:
        self._watch.heartbeat.set(Heartbeat.RESETTING)
        try:
            return super()._reset_games()
        finally:
            self._watch.heartbeat.set(Heartbeat.ACTING)

    def _step_games(self, actions: dict[str, Nest]) -> dict[str, TimeStep]:
        rows = self._watch.step(super()._step_games, actions)
        self._watch.heartbeat.set(Heartbeat.ACTING)
        return rows
