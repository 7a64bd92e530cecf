"""Reading of several sources through one validator."""

from collections.abc import Iterator, Sequence

from gymnasium.spaces import Box

from alfish.errors import UsageError
from alfish.offline.episode import Episode, EpisodeSource
from alfish.offline.report import Report
from alfish.offline.sources import open_source
from alfish.offline.spaces import NO_SPACES, Spaces, check_fit, check_rewards, differences
from alfish.offline.validation import Validator


class Reading:
    """Iterates once over the valid episodes of several sources.

    Args:
      sources: `scheme:where`, or `EpisodeSource` objects.
      environment: spaces that the data must fit; they also replace those that a source does not declare.
      reward: space of the environment's reward, which the data must fit; None: not known.
      policy: 'raise', 'drop_episode' or 'warn', see `Validator`.

    Attributes:
      spaces: of the data: the environment's, or those of the first source that declares any.
      report: of the episodes that were read.

    Raises:
      UsageError: a source cannot be opened; its spaces do not fit the environment's, or the other sources'.
    """

    def __init__(
        self,
        sources: Sequence[str | EpisodeSource],
        environment: Spaces = NO_SPACES,
        reward: Box | None = None,
        policy: str = "raise",
    ):
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
        self.spaces, self._reward = spaces, reward
        try:
            self._validator = Validator(spaces, policy, self.report, environment != NO_SPACES)
        except UsageError as error:
            raise UsageError(f"{self.report.name}: {error}") from error

    def __iter__(self) -> Iterator[Episode]:
        """Yields the valid episodes.

        Raises:
          UsageError: a file is damaged so that no episode is readable, or rewards do not fit the environment; or at the
            end, see `Validator.finish`.
        """
        for source in self.sources:
            for item in source.episodes():
                if len(self.sources) > 1:
                    item = item._replace(id=f"{source.name} {item.id}")
                for episode in self._validator.check(item):
                    if self._reward is not None:
                        check_rewards(sum(episode.rewards.shape[1:]), sum(self._reward.shape), source.name)
                    yield episode
            for level, sentences in (("warning", source.warnings), ("note", source.notes)):
                for sentence in sentences:
                    self.report.add(level, f"{source.name}: {sentence}")
        self._validator.finish()
