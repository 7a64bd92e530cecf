"""The unroller of several policies: collects their rows, and counts their steps."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from alfish.data import Experience
from alfish.environments.games import Games
from alfish.errors import UsageError
from alfish.policies.game_unroller import GameUnroller
from alfish.policies.lineup import Lineup
from alfish.policies.member import Member
from alfish.runs.timer import Timer
from alfish.unrollers.unroller import StepRecords, Unroller
from alfish.unrollers.workers.asynchronous import AsyncUnroller


class JointUnroller(Unroller):
    """Collects for several policies, in this process or in workers, and counts the steps of each policy.

    Args:
      environment: games as the environment of all policies.
      algorithm, transforms: networks of all policies.
      lineup: lineup of the policies.
      members: policies, in the lineup's order.
      collector: unroller that acts; the result of its `unroll` and its `records` are dicts by the policy's name.

    Attributes:
      games: games of `environment`; with workers an example, which is closed when the workers start.
      lineup, members, collector: the constructor's arguments.
      records: records of the last unroll for the metrics of each policy, in the order of the policies.
    """

    records: tuple[StepRecords, ...] | None  # type: ignore[assignment]

    def __init__(
        self,
        environment: Any,
        algorithm: Any,
        transforms: Any,
        lineup: Lineup,
        members: Sequence[Member],
        collector: GameUnroller | AsyncUnroller,
    ):
        self.collector = collector
        super().__init__(environment, algorithm, transforms)
        self.games: Games = environment.games
        self.lineup, self.members = lineup, tuple(members)
        self.drains, self.num_envs = collector.drains, collector.num_envs
        self.tolerates_errors = collector.tolerates_errors
        self._num_steps = 0

    @property
    def log(self) -> Callable[[str], None]:
        return self.collector.log

    @log.setter
    def log(self, log: Callable[[str], None]) -> None:
        self.collector.log = log

    @property
    def renews_columns(self) -> bool:  # type: ignore[override]
        return self.collector.renews_columns

    @property
    def check_signals(self) -> Callable[[], None]:
        return self.collector.check_signals

    @check_signals.setter
    def check_signals(self, check: Callable[[], None]) -> None:
        self.collector.check_signals = check

    @property
    def policy_version(self) -> int:
        return self.collector.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.collector.policy_version = version

    @property
    def stepping(self) -> str:
        return self.collector.stepping

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def bind(self, make_environment: Callable[..., Any], unroll_length: float, seed: int) -> None:
        if unroll_length < 1 or unroll_length != int(unroll_length):
            raise UsageError(
                f"Trainer.unroll_length is {unroll_length}; with several policies it must be an integer of at least 1"
            )
        self.collector.bind(make_environment, unroll_length, seed)
        self.unroll_length = self.collector.unroll_length
        counts = self.collector.num_workers, self.collector.num_segments
        for member in self.members:
            member.spread(self.collector.envs_per_worker / self.games.num_games, *counts)
        self.num_columns = max(1, round(sum(one.steps_per_step for one in self.members if one.trains)))

    def unroll(self, length: int, at_random: Collection[str] = ()) -> dict[str, Experience]:  # type: ignore[override]
        """Collects rows, and counts the steps of each policy; see `GameUnroller` and `AsyncUnroller`."""
        found: Any = self.collector.unroll(length, at_random)  # type: ignore[arg-type]
        records: Any = self.collector.records
        self._num_steps = 0
        for member in self.members:
            steps = records[member.name].num_steps
            member.num_steps += steps if member.is_training or not member.trains else 0
            self._num_steps += steps if member.is_training else 0
        self.records = tuple(records[member.name] for member in self.members)
        return found

    def publish(self) -> None:
        self.collector.publish()

    def ignore_infos(self) -> None:
        for member in self.members:
            member.seat.ignore_infos()

    def time(self, timer: Timer) -> None:
        self.collector.time(timer)
        for member in self.members:
            member.time(timer)

    def stats(self) -> dict[str, float]:
        return self.collector.stats()

    def rebuild(self, member: Member, bindings: Mapping[str, str], parent: Member | None = None) -> None:
        """Builds a policy again, see `Member.rebuild` and `Member.continue_from`. Workers begin new games.

        Args:
          member: policy to build.
          bindings: new values, as gin text, of the parameters that a population has changed, by the parameter's name.
          parent: policy whose networks `member` takes; None means that the state of `member` is loaded afterwards.
        """
        if parent is None:
            member.rebuild(bindings)
        else:
            member.continue_from(parent, bindings)
        self._algorithm.add_module(member.name, member.algorithm)
        self._transforms.add_module(member.name, member.transforms)
        if isinstance(self.collector, AsyncUnroller):
            self.collector.restart()

    def state_dict(self) -> dict[str, Any]:
        return {**self.collector.state_dict(), "num_steps": {member.name: member.num_steps for member in self.members}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.load_state_dict(state)
        for member in self.members:
            member.num_steps = state["num_steps"][member.name]

    def break_off(self) -> None:
        self.collector.break_off()

    def close(self) -> None:
        self.collector.close()
