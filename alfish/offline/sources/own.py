"""alfish's own layout, which `alfish import` writes."""

import json
from collections.abc import Iterator

from alfish.checkpoint import Checkpoints
from alfish.errors import UsageError
from alfish.offline.data_set import EPISODES_DIRECTORY, FORMAT_VERSION, INDEX_FILE, unpacked_episodes
from alfish.offline.episode import Episode, EpisodeSource, Unreadable
from alfish.offline.sources.files import existing_directory
from alfish.offline.spaces import NO_SPACES, Spaces, from_json


class OwnSource(EpisodeSource):
    """Episodes of `alfish:directory`.

    Args:
      where: the directory.
      environment: not used.

    Raises:
      UsageError: there is no such directory, or it is damaged.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        directory = existing_directory(where, "what `alfish import` writes")
        path = directory / INDEX_FILE
        if not path.is_file():
            raise UsageError(f"{where} has no {INDEX_FILE}, so it is not what `alfish import` writes")
        try:
            index = json.loads(path.read_text())
            version = index["format"]
            spaces = Spaces(from_json(index["observation_space"]), from_json(index["action_space"]))
            self._num_episodes = [int(count) for count in index["num_episodes_of_file"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is damaged ({error}); import the data again") from error
        if version != FORMAT_VERSION:
            raise UsageError(f"{where} is of format {version}, and this alfish reads {FORMAT_VERSION}; import it again")
        super().__init__(f"alfish:{where}", spaces)
        self._checkpoints = Checkpoints(directory / EPISODES_DIRECTORY)

    def episodes(self) -> Iterator[Episode | Unreadable]:
        first = 0
        for number, count in enumerate(self._num_episodes):
            try:
                _, state = self._checkpoints.load(number)
            except UsageError as error:
                readable = len(self._num_episodes) - 1
                what = f"{str(error).partition(';')[0]}; {readable} other files of the data set are there"
                for i in range(first, first + count):
                    yield Unreadable(str(i), what)
            else:
                yield from unpacked_episodes(state)
            first += count
