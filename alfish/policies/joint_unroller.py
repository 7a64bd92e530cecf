"""The unroller of several policies, which act together in games."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from alfish import nest
from alfish.data import Experience
from alfish.environments.games import Games
from alfish.errors import UsageError
from alfish.errors.user_code import calling
from alfish.nest import Nest
from alfish.policies.lineup import Lineup
from alfish.policies.member import Member
from alfish.runs.random_state import apart
from alfish.runs.timer import Timer
from alfish.unrollers.unroller import ENVIRONMENT, StepRecords, Unroller


class JointUnroller(Unroller):
    """Steps games in this process with several policies.

    In each step every policy acts in its columns, then all games step. An unroll of T steps has T rows of every column,
    fewer where an agent has no row; a policy's rows do not depend on those of other policies, unless the games do.

    Args:
      environment: games as the environment of all policies.
      algorithm, transforms: networks of all policies.
      lineup: lineup of the policies.
      members: policies, in the lineup's order.

    Attributes:
      games, lineup, members: games of `environment`, and the arguments.
      records: records of the last unroll, for the metrics of each policy, in their order.
    """

    records: tuple[StepRecords, ...] | None  # type: ignore[assignment]

    def __init__(
        self,
        environment: Any,
        algorithm: Any,
        transforms: Any,
        lineup: Lineup,
        members: Sequence[Member],
    ):
        super().__init__(environment, algorithm, transforms)
        self.games: Games = environment.games
        self.lineup, self.members = lineup, tuple(members)
        self.num_envs = self.games.num_games
        self.num_columns = max(1, round(sum(member.steps_per_step for member in members if member.trains)))
        self._step = self.games.step
        self._has_begun = False
        self._num_steps = 0
        self._by_group = {
            key: [member for member in members if lineup.group[member.name] == key] for key in self.games.groups
        }

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def bind(self, make_environment: Callable[..., Any], unroll_length: float, seed: int) -> None:
        if unroll_length < 1 or unroll_length != int(unroll_length):
            raise UsageError(
                f"Trainer.unroll_length is {unroll_length}; with several policies it must be an integer of at least 1"
            )
        super().bind(make_environment, unroll_length, seed)

    def unroll(self, length: int, at_random: Collection[str] = ()) -> dict[str, Experience]:  # type: ignore[override]
        """Collects the rows of `length` steps of all games.

        Args:
          length: number of steps.
          at_random: names of the policies that act with the algorithm's `random_action`.

        Returns:
          Experience by policy, arrays `[length, C, ...]`, on-policy `[length+1, C, ...]`, of the C columns that the
          policy may play; PAD rows come last.

        Raises:
          RunError: a game returned a reward or an observation that is not finite.
        """
        self._begin()
        if self.games.follows_progress:
            self.games.set_progress(self._algorithm.progress_number())
        for member in self.members:
            with member.stream:
                member.seat.begin(member.name in at_random, self.policy_version)
        for _ in range(length):
            actions = {key: self._actions(key) for key in self.games.groups}
            with apart():
                rows = self._step(actions)
            self.lineup.draw()
            for key, members in self._by_group.items():
                for member in members:
                    seat, is_played = member.seat, self._is_played(member)
                    info = _own_info(self.games.infos[key], seat.columns, is_played)
                    seat.arrive(seat.place(rows[key], is_played), info)
        found, records, self._num_steps = {}, [], 0
        for member in self.members:
            with member.stream:
                found[member.name] = member.seat.finish()
            assert isinstance(member.seat.records, StepRecords)
            records.append(member.seat.records)
            steps = member.seat.num_steps
            member.num_steps += steps if member.is_training or not member.trains else 0
            self._num_steps += steps if member.is_training else 0
        self.records = tuple(records)
        return found

    def ignore_infos(self) -> None:
        for member in self.members:
            member.seat.ignore_infos()

    def time(self, timer: Timer) -> None:
        self._step = timer.around(ENVIRONMENT, self._step)
        for member in self.members:
            member.time(timer)

    def rebuild(self, member: Member, bindings: Mapping[str, str], parent: Member | None = None) -> None:
        """Builds a policy again, see `Member.rebuild` and `Member.continue_from`.

        Args:
          member: policy to build.
          bindings: gin texts of the parameters that a population has changed, by name.
          parent: policy whose networks it continues with; None means that its state is loaded afterwards.
        """
        if parent is None:
            member.rebuild(bindings)
        else:
            member.continue_from(parent, bindings)
        self._algorithm.add_module(member.name, member.algorithm)
        self._transforms.add_module(member.name, member.transforms)

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy_version": self.policy_version,
            "environment": self.games.state_dict(),
            "playing": {key: nest.as_tensor(numbers) for key, numbers in self.lineup.playing.items()},
            "seats": {member.name: member.seat.state_dict() for member in self.members},
            "num_steps": {member.name: member.num_steps for member in self.members},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy_version = state["policy_version"]
        continues = self.games.load_state_dict(state["environment"])
        for key, numbers in state["playing"].items():
            self.lineup.playing[key][:] = numbers.numpy()
        for member in self.members:
            member.seat.load_state_dict(state["seats"][member.name], continues)
            member.num_steps = state["num_steps"][member.name]
        self._has_begun = all(member.seat.time_step is not None for member in self.members)

    def break_off(self) -> None:
        self._has_begun = False
        for member in self.members:
            member.seat.break_off()
        self.games.abandon()

    def close(self) -> None:
        self.games.close()

    def _begin(self) -> None:
        """Resets the games before the first unroll, and after episodes were dropped."""
        if self._has_begun:
            return
        with calling(f"{self.games.name}.reset"), apart():
            rows = self.games.reset()
        self.lineup.draw()
        for member in self.members:
            own = rows[self.lineup.group[member.name]]
            member.seat.seat(member.seat.place(own, self._is_played(member)))
        self._has_begun = True

    def _is_played(self, member: Member) -> np.ndarray | None:
        """Returns the columns of its group that a policy plays now, `[columns]` bool; None if these are fixed."""
        if self.lineup.is_fixed:
            return None
        return self.lineup.playing[self.lineup.group[member.name]] == self.lineup.names.index(member.name)

    def _actions(self, key: str) -> Nest:
        """Returns the actions of a group, arrays `[columns, ...]`, each chosen by the policy that plays the column."""
        actions: Nest = None
        for member in self._by_group[key]:
            seat = member.seat
            with member.stream:
                own = seat.choose()
            if type(seat.columns) is slice and self.lineup.is_fixed:
                return own  # the only policy of the group
            if actions is None:
                num_columns = self.games.groups[key].num_envs
                actions = nest.map(lambda leaf, n=num_columns: np.zeros((n, *leaf.shape[1:]), leaf.dtype), own)
            columns, is_played = np.arange(num_columns)[seat.columns], self._is_played(member)
            rows = slice(None) if is_played is None else is_played[seat.columns]
            for leaf, chosen in zip(nest.leaves(actions), nest.leaves(own), strict=True):
                leaf[columns[rows]] = chosen[rows]
        return actions


def _own_info(info: dict[str, Any], columns: Any, is_played: np.ndarray | None) -> dict[str, Any]:
    """Returns the info of some columns; entries of columns that are not played are marked as missing."""
    if not info or (type(columns) is slice and is_played is None):
        return info
    found: dict[str, Any] = {}
    for key, value in info.items():
        if isinstance(value, dict):
            found[key] = _own_info(value, columns, is_played)
            continue
        own = value[columns]
        found[key] = own & is_played[columns] if is_played is not None and key.startswith("_") else own
    return found
