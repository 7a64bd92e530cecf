"""OGBench's .npz files as published: trajectories of T + 1 states, one after the other.

`terminals` is 1 at the last state of a trajectory, where the time limit ends it; the action of that row was not taken.
A trajectory is therefore a truncated episode of T transitions; its final observation is the last state. Extra arrays,
such as `qpos`, are not read. The format declares no spaces, and files of goal-conditioned tasks have no rewards.
"""

from collections.abc import Iterator

import numpy as np

from alfish import nest
from alfish.errors import UsageError
from alfish.offline.episode import Episode, EpisodeSource, Unreadable, ends
from alfish.offline.recorded_spaces import NO_SPACES, Spaces
from alfish.offline.sources import flat
from alfish.offline.sources.npz import open_npz
from alfish.offline.sources.source_files import blocks, existing_file, inside, missing, read_rows

NEEDED = ("observations", "actions", "terminals")
LOADED = ("next_observations", "valids", "masks")  # fields that OGBench adds when it reads a file


class OGBenchSource(EpisodeSource):
    """Reads the episodes of `ogbench:file.npz`.

    Args:
      where: path of the file.
      environment: spaces of the environment, which are not used.

    Raises:
      UsageError: the file does not exist, or was not published by OGBench.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        self._path = existing_file(where, "an OGBench data set")
        super().__init__(f"ogbench:{where}")
        with open_npz(self._path) as arrays:
            names = {*arrays}
        lacking, loaded = missing(names, NEEDED), [name for name in LOADED if name in names]
        if lacking:
            raise UsageError(
                f"{where} has no {' and no '.join(lacking)}, so it is not an OGBench data set; it has "
                f"{', '.join(sorted(names)) or 'nothing'}"
            )
        if loaded:
            raise UsageError(
                f"{where} has {' and '.join(loaded)}, which OGBench adds when it loads a data set; use the file as it "
                "was downloaded, or write these transitions as npz:FILE, see docs/offline.md"
            )
        self._has_rewards = "rewards" in names
        if not self._has_rewards:
            self.note("there are no rewards: all are 0, which is enough to imitate")
        self.note(
            "the last state of a trajectory is its final observation, and the action there, which was not taken, is "
            "dropped; terminals mark the time limit, so all episodes are truncated"
        )

    def episodes(self) -> Iterator[Episode | Unreadable]:
        with open_npz(self._path) as arrays:
            is_last = flat.flags(arrays["terminals"], f"{self.name}: terminals")
            rewards = arrays["rewards"] if self._has_rewards else np.zeros(len(is_last), np.float32)
            table = flat.TransitionTable(arrays["observations"], arrays["actions"], rewards, is_last & False, is_last)
            flat.check_shapes(table, self.name)
            is_last[-1:] = True  # an incomplete last trajectory ends at its last state
            number = 0
            for block in blocks(np.flatnonzero(is_last) + 1, size=flat.block_size(table)):
                read = [read_rows(part, slice(block[0].start, block[-1].stop)) for part in table[:3]]
                for rows in block:
                    observations, actions, arrived = nest.at(read, inside(rows, block))
                    length = rows.stop - rows.start - 1
                    yield Episode(str(number), observations, actions[:-1], arrived[:-1], *ends(length, False, True))
                    number += 1
