"""alfish's own format, written by `alfish import`."""

import operator
from collections.abc import Iterator

from alfish.errors import UsageError
from alfish.offline.data_set import EPISODES_DIRECTORY, FORMAT_VERSION, INDEX_FILE, unpacked_episodes
from alfish.offline.episode import Episode, EpisodeSource, Unreadable
from alfish.offline.recorded_spaces import NO_SPACES, Spaces, from_json
from alfish.offline.sources.recognition import said_of_directory
from alfish.offline.sources.source_files import existing_directory, read_json, said
from alfish.runs.checkpoints import Checkpoints


class OwnSource(EpisodeSource):
    """Reads the episodes of `alfish:directory`.

    Args:
      where: path of the directory.
      environment: spaces of the environment, which are not used.

    Raises:
      UsageError: the directory does not exist, or is damaged.
    """

    def __init__(self, where: str, environment: Spaces = NO_SPACES):
        directory = existing_directory(where, "what `alfish import` writes")
        path = directory / INDEX_FILE
        if not path.exists():
            raise UsageError(
                f"{where} has no {INDEX_FILE}, so it is not what `alfish import` writes; {said_of_directory(directory)}"
            )
        try:
            index = read_json(path)
            version = index["format"]
            spaces = Spaces(from_json(index["observation_space"]), from_json(index["action_space"]))
            self._num_episodes = [operator.index(count) for count in index["num_episodes_of_file"]]
            if min(self._num_episodes, default=0) < 0:
                raise ValueError(f"a file of {min(self._num_episodes)} episodes")
            num_files = len(Checkpoints(directory / EPISODES_DIRECTORY).steps())
            if len(self._num_episodes) > 2 * num_files + 100:  # some files may be lost
                raise ValueError(f"it declares {len(self._num_episodes):,} files, but there are {num_files:,}")
        except UsageError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError) as error:
            raise UsageError(f"{path} is damaged ({said(error)}); import the data again") from error
        if version != FORMAT_VERSION:
            raise UsageError(
                f"{where} has format {str(version)[:20]}, but this version of alfish reads format {FORMAT_VERSION}; "
                "import it again"
            )
        super().__init__(f"alfish:{where}", spaces)
        self._directory = directory / EPISODES_DIRECTORY
        self._checkpoints = Checkpoints(self._directory)

    def episodes(self) -> Iterator[Episode | Unreadable]:
        first = 0
        for number, count in enumerate(self._num_episodes):
            try:
                found = self._load(number)
            except UsageError as error:
                yield from self._unreadable(number, first, count, str(error).partition(";")[0])
            else:
                if len(found) != count:
                    self.warn(
                        f"file {number} of {self._directory} has {len(found):,} episodes, but {INDEX_FILE} declares "
                        f"{count:,}; the {len(found):,} episodes are read"
                    )
                yield from found
            first += count

    def _load(self, number: int) -> list[Episode]:
        found: list[Episode] = []
        self._checkpoints.load(number, lambda state: found.extend(unpacked_episodes(state)))
        return found

    def _unreadable(self, number: int, first: int, count: int, words: str) -> Iterator[Unreadable]:
        """Yields an item for each episode of a file, or one item if the file cannot contain `count` episodes."""
        path = self._directory / f"checkpoint-{number:012d}.pt"
        named = words if str(self._directory) in words else f"{path}: {words}"
        what = f"{named}; {len(self._num_episodes) - 1} other files of the data set are present"
        if count > (path.stat().st_size if path.is_file() else 0):
            yield Unreadable(f"{first} to {first + count - 1}", what)
            return
        for i in range(first, first + count):
            yield Unreadable(str(i), what)
