"""Stable-Baselines3's replay buffers, as `model.save_replay_buffer` pickles them.

The pickle is read without executing anything of it (`pickles`), and without Stable-Baselines3. Each of its environments
is a column, unrolled from the oldest row. Box actions stand there in [-1, 1], and are stretched to the space's bounds.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from alfish import specs
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, EpisodeSource, Unreadable
from alfish.offline.pickles import load
from alfish.offline.sources import flat
from alfish.offline.sources.files import existing_file
from alfish.offline.spaces import NO_SPACES, Spaces

SPACES = (
    "box.Box",
    "discrete.Discrete",
    "multi_discrete.MultiDiscrete",
    "multi_binary.MultiBinary",
    "dict.Dict",
    "tuple.Tuple",
)
# What a saved buffer refers to, each read as an inert object. The generators are the spaces' own.
INERT = (
    "stable_baselines3.common.buffers.ReplayBuffer",
    "stable_baselines3.common.buffers.DictReplayBuffer",
    "stable_baselines3.common.buffers.NStepReplayBuffer",
    "stable_baselines3.her.her_replay_buffer.HerReplayBuffer",
    "stable_baselines3.her.goal_selection_strategy.GoalSelectionStrategy",
    *(f"{gym}.spaces.{name}" for gym in ("gymnasium", "gym") for name in SPACES),
    "torch.device",
    "numpy.random._pickle.__generator_ctor",
    "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._generator.Generator",
    "numpy.random._pcg64.PCG64",
    "numpy.random._pcg64.__pyx_unpickle_PCG64",
    "numpy.random.bit_generator.SeedSequence",
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
    "gymnasium.utils.seeding.RandomNumberGenerator",
)
NEEDED = ("observations", "actions", "rewards", "dones", "pos", "full", "observation_space", "action_space")


class SB3Source(EpisodeSource):
    """Episodes of `sb3:file.pkl`.

    Args:
      where: the file.
      environment: not used.

    Raises:
      UsageError: there is no such file, or it is anything but a replay buffer.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        path = existing_file(where, "a replay buffer of Stable-Baselines3")
        buffer: Any = load(path, "a replay buffer of Stable-Baselines3", INERT)
        lacking = [name for name in NEEDED if name not in getattr(buffer, "__dict__", {})]
        if lacking:
            found = getattr(buffer, "path", type(buffer).__name__)
            raise UsageError(f"{where} holds a {found}, which is no replay buffer: it has no {', '.join(lacking)}")
        declared = Spaces(_space(buffer.observation_space, where), _space(buffer.action_space, where))
        super().__init__(f"sb3:{where}", declared)
        self._buffer = buffer
        # The oldest row first.
        self._length, newest = len(buffer.rewards), int(buffer.pos)
        self._order = np.arange(newest, newest + self._length) % self._length if buffer.full else np.arange(newest)
        if getattr(buffer, "next_observations", None) is None:
            if buffer.full:
                self._order = self._order[1:]  # the newest row's next observation lies in the place of the oldest's
            self.note(
                "the buffer was made with optimize_memory_usage, so final observations are missing and time-outs look "
                "like terminations"
            )

    def episodes(self) -> Iterator[Episode | Unreadable]:
        for column in range(self._buffer.rewards.shape[1]):
            table = self._column(column)
            ends, num_unmarked = flat.cut(table)
            num_unmarked -= len(ends) > 0 and not (table.terminated | table.truncated)[-1]  # still under way when saved
            if num_unmarked:
                self.note(
                    f"column {column} has {num_unmarked} episodes that break off without a flag: they count as "
                    "truncated"
                )
            for episode in flat.episodes(table, ends):
                yield episode._replace(id=f"{column}.{episode.id}")

    def _column(self, column: int) -> flat.Table:
        buffer, declared = self._buffer, self.spaces
        assert declared.observation is not None and declared.action is not None

        def rows(stored: Any) -> np.ndarray:
            return stored[self._order, column]

        dones = rows(buffer.dones) > 0
        timeouts = rows(buffer.timeouts) > 0 if "timeouts" in buffer.__dict__ else np.zeros_like(dones)
        following = getattr(buffer, "next_observations", None)

        def of(space: spaces.Space, column: Any) -> Nest:
            return specs.map_space(lambda leaf, part: rows(part).reshape(-1, *leaf.shape), space, column)

        observations, actions = of(declared.observation, buffer.observations), of(declared.action, buffer.actions)
        if isinstance(declared.action, spaces.Box):  # which stable-baselines3 keeps in [-1, 1], as alfish does
            actions = specs.ActionUnits(declared.action).to_environment(actions.reshape(len(actions), -1))
        return flat.Table(
            observations,
            actions.astype(declared.action.dtype),
            rows(buffer.rewards),
            dones & ~timeouts,
            dones & timeouts,
            None if following is None else of(declared.observation, following),
        )


def _space(said: Any, where: str) -> spaces.Space:
    """The space that an inert object describes."""
    kind, of = type(said).__name__, getattr(said, "__dict__", {})
    try:
        if kind == "Box":
            low, high = np.array(of["low"]), np.array(of["high"])
            return spaces.Box(low, high, low.shape, np.dtype(of["dtype"]).type)
        if kind == "Discrete":
            return spaces.Discrete(int(of["n"]), start=int(of.get("start", 0)))
        if kind == "MultiDiscrete":
            return spaces.MultiDiscrete(np.array(of["nvec"]), start=np.array(of["start"]) if "start" in of else None)
        if kind == "MultiBinary":
            count = of["n"]
            return spaces.MultiBinary(int(count) if np.ndim(count) == 0 else [int(size) for size in count])
        if kind == "Dict":
            return spaces.Dict({key: _space(child, where) for key, child in of["spaces"].items()})
        if kind == "Tuple":
            return spaces.Tuple([_space(child, where) for child in of["spaces"]])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{where} describes a {kind} space that cannot be read ({error})") from error
    raise UsageError(f"{where} has a {kind} in the place of a space")
