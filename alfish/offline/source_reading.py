"""Reads several sources with one validator, and selects the episodes that a buffer keeps.

Episodes are selected by the buffer's length and by their returns, and some of them are held out.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from absl import logging
from gymnasium.spaces import Box

from alfish.errors import UsageError, counted
from alfish.offline.data_report import DataReport
from alfish.offline.episode import Episode, EpisodeSource
from alfish.offline.recorded_spaces import NO_SPACES, Spaces, check_fit, check_rewards, differences
from alfish.offline.sources import open_source
from alfish.offline.validation import Validator


class SourceReading:
    """Iterates once over the valid episodes of several sources.

    Args:
      sources: sources of the episodes: `scheme:where`, or `EpisodeSource` objects.
      environment: spaces that the data must fit; also used for sources that declare no spaces.
      reward: space of the environment's reward, which the data must fit; None means that rewards are not checked.
      policy: treatment of faulty episodes: 'raise', 'drop_episode' or 'warn', see `Validator`.

    Attributes:
      spaces: spaces of the data: `environment`, or if that is incomplete, those of the first source that declares both.
      report: report on the episodes that were read.

    Raises:
      UsageError: a source cannot be opened, or its spaces do not fit the environment's spaces or other sources' spaces.
    """

    def __init__(
        self,
        sources: Sequence[str | EpisodeSource],
        environment: Spaces = NO_SPACES,
        reward: Box | None = None,
        policy: str = "raise",
    ):
        if isinstance(sources, str) or not sources:
            raise UsageError(
                f"the sources are {sources!r}; give a list with at least one source, such as ['minari:name']"
            )
        self.sources = [open_source(source, environment) if isinstance(source, str) else source for source in sources]
        self.report = DataReport(" + ".join(source.name for source in self.sources))
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
          UsageError: no episode of a file is readable, or rewards do not fit the environment; or, after the last
            episode, `Validator.finish` raises it.
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


def selected(
    reading: SourceReading, length: int | None, top_fraction: float, holdout_fraction: float
) -> tuple[list[Episode], list[Episode]]:
    """Returns the episodes to train on, and the held-out episodes, both in the order of the sources.

    Args:
      reading: reading of the sources; it is read to its end.
      length: maximum total number of rows; the report lists episodes that do not fit. None means no limit.
      top_fraction: fraction of the fitting episodes to keep, in (0, 1]: the episodes with the greatest returns.
      holdout_fraction: fraction of the kept episodes to hold out, in [0, 1); they are evenly spaced.

    Raises:
      UsageError: the first episode does not fit, no episode is left to train on, or `top_fraction` is below 1 and
        rewards are vectors.
    """
    episodes = _fitting(reading, length)
    report = reading.report
    if report.num_bad:
        number = f"{report.num_bad:,} of {counted(report.num_read, 'episode')}"
        logging.warning("%s: %s left out: %s", report.name, number, report.sentences("error"))
    for level in ("warning", "mended"):
        if report.found(level):
            logging.warning("%s: %s", report.name, report.sentences(level))
    return _split(_best(episodes, top_fraction), holdout_fraction, report.name)


def _fitting(reading: SourceReading, length: int | None) -> list[Episode]:
    """Returns as many of the first episodes as fit into `length` rows; adds the other episodes to the report."""
    fitting: list[Episode] = []
    left_out: list[str] = []
    num_rows = 0
    for episode in reading:
        if left_out or (length is not None and num_rows + episode.length + 1 > length):
            left_out.append(episode.id)
        else:
            fitting.append(episode)
            num_rows += episode.length + 1
    report = reading.report
    for id in left_out:
        report.add("warning", f"it does not fit into OfflineBuffer.length = {length:,} rows, and is left out", id)
    if not fitting:
        raise UsageError(
            f"OfflineBuffer.length is {length}, but the first episode of {report.name} has more rows; raise the length"
        )
    return fitting


def _best(episodes: list[Episode], fraction: float) -> list[Episode]:
    """Returns the episodes with the greatest undiscounted returns, in the order of the sources."""
    if fraction < 1 and episodes[0].rewards.ndim > 1:
        raise UsageError(
            "OfflineBuffer.top_fraction ranks episodes by their returns, but the rewards are vectors of "
            f"{episodes[0].rewards.shape[1]} entries; set top_fraction to 1, or select episodes when you record them"
        )
    number = max(1, round(fraction * len(episodes)))
    returns = np.array([episode.rewards.sum(dtype=np.float64) for episode in episodes])
    return [episodes[i] for i in sorted(np.argsort(-returns, kind="stable")[:number])]


def _split(episodes: list[Episode], fraction: float, name: str) -> tuple[list[Episode], list[Episode]]:
    """Returns the episodes to train on, and the evenly spaced held-out episodes."""
    number = math.ceil(fraction * len(episodes))
    if number and number >= len(episodes):
        raise UsageError(
            f"OfflineBuffer.holdout_fraction is {fraction}, but {name} has only "
            f"{counted(len(episodes), 'episode')} to split; lower the fraction"
        )
    held_out = {int((k + 0.5) * len(episodes) / number) for k in range(number)}
    return [e for i, e in enumerate(episodes) if i not in held_out], [episodes[i] for i in sorted(held_out)]
