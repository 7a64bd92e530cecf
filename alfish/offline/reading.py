"""Sources, one after the other, through one validator."""

from collections.abc import Iterator, Sequence

from alfish.errors import UsageError
from alfish.offline.episode import Episode, EpisodeSource
from alfish.offline.report import Report
from alfish.offline.sources import open_source
from alfish.offline.spaces import NO_SPACES, Spaces, check_fit, differences
from alfish.offline.validation import Validator


class Reading:
    """The valid episodes of several sources; iterated over once.

    Args:
      sources: `scheme:where`, or sources themselves.
      environment: its spaces, which the data must fit; they also stand in for what a source does not declare.
      policy: 'raise', 'drop_episode' or 'warn', see `Validator`.

    Attributes:
      spaces: of the data: the environment's, or the first that a source declares.
      report: of what was read so far.

    Raises:
      UsageError: a source cannot be opened; its spaces do not fit the environment's, or the other sources'.
    """

    def __init__(self, sources: Sequence[str | EpisodeSource], environment: Spaces = NO_SPACES, policy: str = "raise"):
        if isinstance(sources, str) or not sources:
            raise UsageError(f"the sources are {sources!r}; give a list of at least one, as ['minari:name']")
        self.sources = [open_source(source, environment) if isinstance(source, str) else source for source in sources]
        self.report = Report(" + ".join(source.name for source in self.sources))
        spaces, whose = environment, "the environment's"
        for source in self.sources:
            declared = source.spaces
            check_fit(declared, spaces, source.name, whose)
            for difference in differences(declared, environment):
                self.report.add("warning", f"{source.name}: {difference}")
            if None in spaces and None not in declared:
                spaces, whose = declared, f"those of {source.name}"
        self.spaces = spaces
        try:
            self._validator = Validator(spaces, policy, self.report)
        except UsageError as error:
            raise UsageError(f"{self.report.name}: {error}") from error

    def __iter__(self) -> Iterator[Episode]:
        """
        Raises:
          UsageError: at the end, see `Validator.finish`; or a file is damaged so that no episode of it is readable.
        """
        for source in self.sources:
            for item in source.episodes():
                if len(self.sources) > 1:
                    item = item._replace(id=f"{source.name} {item.id}")
                yield from self._validator.check(item)
            for level, sentences in (("warning", source.warnings), ("note", source.notes)):
                for sentence in sentences:
                    self.report.add(level, f"{source.name}: {sentence}")
        self._validator.finish()
