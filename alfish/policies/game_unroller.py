"""Acts with several policies in games, in this process."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from alfish import nest
from alfish.data import Experience, TimeStep
from alfish.environments.games import Games
from alfish.errors.user_code import calling
from alfish.nest import Nest
from alfish.policies.lineup import Lineup
from alfish.policies.seat import Seat
from alfish.runs.random_state import apart, called_apart, set_torch_state, torch_state
from alfish.runs.timer import Timer
from alfish.unrollers.unroller import ENVIRONMENT, StepRecords, Unroller


class Player(Protocol):
    """Interface of a policy that acts: its name and its seat."""

    name: str
    seat: Seat


class GameUnroller(Unroller):
    """Steps games with several policies.

    In each step, every policy acts in its columns, then all games step. An unroll of T steps has T rows of every
    column, or fewer where an agent has no row. The rows of a policy depend on other policies only through the games.

    Args:
      environment: games as the environment of all policies.
      algorithm, transforms: networks of all policies.
      lineup: lineup of the policies.
      players: policies, in the lineup's order.

    Attributes:
      games: games of `environment`.
      lineup: the constructor's argument.
      records: records of the last unroll by policy, for its metrics.
      num_workers, num_segments, envs_per_worker: counts as in `AsyncUnroller`: 1, 1, and the number of games.
    """

    num_workers = num_segments = 1
    records: dict[str, StepRecords] | None  # type: ignore[assignment]

    def __init__(self, environment: Any, algorithm: Any, transforms: Any, lineup: Lineup, players: Sequence[Player]):
        super().__init__(environment, algorithm, transforms)
        self.games: Games = environment.games
        self.lineup, self._players = lineup, tuple(players)
        self.num_envs = self.envs_per_worker = self.games.num_games
        self._step = called_apart(self.games.step)
        self._has_begun = False
        self._by_group = {
            key: [player for player in players if lineup.group[player.name] == key] for key in self.games.groups
        }

    def start(self) -> None:
        """Resets the games, before the first unroll and after episodes were dropped."""
        if self._has_begun:
            return
        self._tell_progress()
        if not any(player.seat.reads_infos for player in self._players):
            self.games.ignore_infos()
        rows = self._reset_games()
        self.lineup.draw()
        for player in self._players:
            own = rows[self.lineup.group[player.name]]
            player.seat.seat(own, self._is_played(player))
        self._has_begun = True

    def unroll(self, length: int, at_random: Collection[str] = ()) -> dict[str, Experience]:  # type: ignore[override]
        """Collects the rows of `length` steps of all games.

        Args:
          length: number of steps.
          at_random: names of the policies that act with the algorithm's `random_action`.

        Returns:
          Experience of each policy in the C columns that it may play: arrays `[length, C, ...]`, on-policy
          `[length+1, C, ...]`; PAD rows come last.

        Raises:
          RunError: a game returned a reward or an observation that is not finite.
        """
        self.start()
        self._tell_progress()
        for player in self._players:
            with player.seat.stream:
                player.seat.begin(player.name in at_random, self.policy_version)
        for _ in range(length):
            rows = self._step_games(self._all_actions())
            if not self.lineup.is_fixed:
                self.lineup.draw()
            infos, broken = self.games.infos, self.games.broken
            for key, players in self._by_group.items():
                for player in players:
                    seat, info = player.seat, {}
                    is_played = None if self.lineup.is_fixed else self._is_played(player)
                    if infos[key] and seat.reads_infos:
                        info = _own_info(infos[key], seat.columns, is_played)
                    seat.arrive(rows[key], is_played, info, broken.get(key))
        found, self.records = {}, {}
        for player in self._players:
            with player.seat.stream:
                found[player.name] = player.seat.finish()
            assert isinstance(player.seat.records, StepRecords)
            self.records[player.name] = player.seat.records
        return found

    def ignore_infos(self) -> None:
        for player in self._players:
            player.seat.ignore_infos()

    def time(self, timer: Timer) -> None:
        self._step = timer.around(ENVIRONMENT, self._step)

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy_version": self.policy_version,
            "environment": self.games.state_dict(),
            "playing": {key: nest.as_tensor(numbers) for key, numbers in self.lineup.playing.items()},
            "seats": {player.name: player.seat.state_dict() for player in self._players},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy_version = state["policy_version"]
        if "seats" not in state:  # the state of an `AsyncUnroller`; new games begin
            return
        continues = self.games.load_state_dict(state["environment"])
        for key, numbers in state["playing"].items():
            self.lineup.playing[key][:] = numbers.numpy()
        for player in self._players:
            player.seat.load_state_dict(state["seats"][player.name], continues)
        self._has_begun = all(player.seat.time_step is not None for player in self._players)

    def break_off(self) -> None:
        self._has_begun = False
        for player in self._players:
            player.seat.break_off()
        self.games.abandon()

    def close(self) -> None:
        self.games.close()

    def _reset_games(self) -> dict[str, TimeStep]:
        with calling(f"{self.games.name}.reset"), apart():
            return self.games.reset()

    def _step_games(self, actions: dict[str, Nest]) -> dict[str, TimeStep]:
        return self._step(actions)

    def _tell_progress(self) -> None:
        if self.games.follows_progress:
            self.games.set_progress(self._algorithm.progress_number())

    def _is_played(self, player: Player) -> np.ndarray | None:
        """Returns a mask of the group's columns that a policy plays now; None if each agent has only one policy."""
        if self.lineup.is_fixed:
            return None
        return self.lineup.playing[self.lineup.group[player.name]] == self.lineup.names.index(player.name)

    def _all_actions(self) -> dict[str, Nest]:
        """Returns the actions of all groups; each policy acts with its own random numbers."""
        device = self._algorithm.progress.device
        others = torch_state(device)
        try:
            return {key: self._actions(key) for key in self._by_group}
        finally:
            set_torch_state(device, others)

    def _actions(self, key: str) -> Nest:
        """Returns a group's actions, arrays `[columns, ...]`; the policy that plays a column chooses its action."""
        actions: Nest = None
        for player in self._by_group[key]:
            seat = player.seat
            seat.stream.resume()
            own = seat.choose()
            seat.stream.suspend()
            if self.lineup.is_fixed and type(seat.columns) is slice:
                return own  # the only policy of the group
            if actions is None:
                num_columns = self.games.groups[key].num_envs
                actions = nest.map(lambda leaf, n=num_columns: np.zeros((n, *leaf.shape[1:]), leaf.dtype), own)
            columns, is_played = np.arange(num_columns)[seat.columns], self._is_played(player)
            rows = slice(None) if is_played is None else is_played[seat.columns]
            for leaf, chosen in zip(nest.leaves(actions), nest.leaves(own), strict=True):
                leaf[columns[rows]] = chosen[rows]
        return actions


def _own_info(info: dict[str, Any], columns: Any, is_played: np.ndarray | None) -> dict[str, Any]:
    """Returns the info of some columns; marks entries of columns that the policy does not play as missing."""
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
