"""D4RL's HDF5 files: one table of transitions with `terminals`, `timeouts` and sometimes `next_observations`.

Needs the extra 'hdf5'. Observations may be a group of several arrays. The format declares no spaces.
"""

from collections.abc import Iterator

from alfish.errors import UsageError
from alfish.offline.episode import Episode, EpisodeSource, Unreadable
from alfish.offline.recorded_spaces import NO_SPACES, Spaces
from alfish.offline.sources import flat
from alfish.offline.sources.recognition import foreign_hdf5
from alfish.offline.sources.source_files import damage_named, existing_file, hdf5_nest, missing, open_hdf5

NEEDED = ("observations", "actions", "rewards", "terminals")


class D4RLSource(EpisodeSource):
    """Reads the episodes of `d4rl:file.hdf5`.

    Args:
      where: path of the file.
      environment: spaces of the environment, which are not used.

    Raises:
      UsageError: the file does not exist, or is not in this format.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        self._path = existing_file(where, "a D4RL data set")
        super().__init__(f"d4rl:{where}")
        with open_hdf5(self._path, "a D4RL data set") as file, damage_named(self._path):
            lacking = missing(file, NEEDED)
            if lacking:
                hint = " (it looks like a d3rlpy data set: d3rlpy:FILE)" if "num_episodes" in file else ""
                has = foreign_hdf5(file) or f"it has {', '.join(sorted(file)) or 'nothing'}"
                raise UsageError(
                    f"{where} has no {' and no '.join(lacking)}, so it is not a D4RL data set{hint}; {has}"
                )
            if "episode_terminals" in file and "timeouts" not in file:
                raise UsageError(f"{where} has episode_terminals, so it is a d3rlpy data set; write d3rlpy:{where}")

    def episodes(self) -> Iterator[Episode | Unreadable]:
        with open_hdf5(self._path, "a D4RL data set", is_checked=True) as file:
            with damage_named(self._path):
                terminated = flat.flags(file["terminals"], f"{self.name}: terminals")
                truncated = None
                if "timeouts" in file:
                    truncated = flat.flags(file["timeouts"], f"{self.name}: timeouts")
                observations, actions = hdf5_nest(file["observations"]), hdf5_nest(file["actions"])
                following = hdf5_nest(file["next_observations"]) if "next_observations" in file else None
                table = flat.TransitionTable(observations, actions, file["rewards"], terminated, truncated, following)
                flat.check_shapes(table, self.name)
                ends, num_unmarked = flat.cut(table)
            for sentence in flat.notes(table, num_unmarked):
                self.note(sentence)
            for sentence in flat.warnings(table, "timeouts", num_unmarked):
                self.warn(sentence)
            yield from flat.episodes(table, ends)
