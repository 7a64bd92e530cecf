"""Looks at every episode before anything learns from it, mends what has one right answer, and reports the rest.

Four kinds of findings:
1. errors of form: a missing field, lengths that do not fit, another nest or shape, a dtype that cannot be cast, an
   episode that cannot be read. Such an episode can never be used.
   Neither can one with a Discrete, MultiDiscrete or MultiBinary value out of its range, or with an action that its
   mask forbids.
2. errors of content, which the policy 'warn' lets pass: values that are not finite (kept), an end before the last step
   (the episode is split there), Box actions out of bounds (clipped).
3. mended: float64 and integers to the stream's dtypes, both flags (terminated), no flag at the end (truncated), T
   observations in place of T+1, Box actions outside by up to 1e-6 (clipped), empty episodes (left out).
4. warnings: see `Survey.warn`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from alfish import nest, specs
from alfish.errors import UsageError
from alfish.offline.episode import Episode, Unreadable, without_final_observation
from alfish.offline.form import EpisodeForm, UnusableError
from alfish.offline.report import Report
from alfish.offline.spaces import NO_SPACES, Spaces
from alfish.offline.survey import Survey

POLICIES = ("raise", "drop_episode", "warn")
MISFIT_FRACTION = 0.9  # of the episodes; where as many have errors, the data are of another environment
NO_ENVIRONMENT = "name the environment of these data with --env_id (OfflineBuffer.env_id), or write them again"
OTHER_ENVIRONMENT = (
    "they do not fit the environment that was named: name the one that they were recorded in, wrapped as it was then, "
    "or write them again"
)
CLIPPED_SILENTLY = 1e-6  # float32 rounds about as much in a conversion of units


class Validator:
    """Checks episodes one by one.

    Args:
      spaces: that the data must fit; where one is None, the first episode says what the others must be like.
      policy: 'raise' reads everything, and `finish` raises if there was an error; 'drop_episode' leaves out episodes
        with errors; 'warn' leaves out only those that cannot be used.
      report: to write to.
      is_named: whether the spaces are those of an environment that the user named.

    Raises:
      UsageError: there is no such policy, or a space that cannot be learned from.
    """

    def __init__(
        self,
        spaces: Spaces = NO_SPACES,
        policy: str = "raise",
        report: Report | None = None,
        is_named: bool = False,
    ):
        if policy not in POLICIES:
            raise UsageError(f"the policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
        self._policy = policy
        self.report = Report() if report is None else report
        self._form = EpisodeForm(spaces, self.report)
        self._survey = Survey(self._form, self.report)
        self._misfit_remedy = OTHER_ENVIRONMENT if is_named else NO_ENVIRONMENT
        self._num_unreadable = 0

    def check(self, item: Episode | Unreadable) -> Iterator[Episode]:
        """Yields what can be used of an episode: the whole of it, nothing, or the parts that it is split into."""
        self.report.num_read += 1
        if isinstance(item, Unreadable):
            self._num_unreadable += 1
            self.report.add("error", f"it is not readable: {item.reason}", item.id)
            return
        try:
            episode = self._form.fitted(item)
        except UnusableError as error:
            self.report.add("error", str(error), item.id)
            return
        faults = list(self._faults(episode)) if episode.length else []
        for fault, remedy, values in faults:
            tolerated = self._policy == "warn"
            self.report.add("warning" if tolerated else "error", fault + remedy * tolerated, item.id, values)
        if faults and self._policy != "warn":
            return
        for part in _split(episode):
            if part.length:
                part = self._clipped(part)
                self._survey.add(part)
                yield part
            else:
                self.report.add("mended", "it is empty, and left out", part.id)

    def finish(self) -> None:
        """Adds the warnings of `Survey`; to be called after the last episode.

        Raises:
          UsageError: the policy is 'raise' and there was an error, or no episode is left.
        """
        report = self.report
        if report.num_kept:
            self._survey.warn()
        if report.found("error") and self._policy == "raise":
            remedy = "mend the data, or leave these episodes out with the policy 'drop_episode'"
            if report.num_bad - self._num_unreadable >= MISFIT_FRACTION * report.num_read:
                remedy = self._misfit_remedy
            raise UsageError(
                f"{report.name}: {report.num_bad:,} of {report.num_read:,} episodes are not fit to learn from: "
                f"{report.sentences('error')}; {remedy}"
            )
        if not report.num_kept:
            why = report.sentences("mended") or "there is none"
            if report.found("error"):
                remedy = "write or fetch them again" if self._num_unreadable == report.num_bad else self._misfit_remedy
                why = f"{report.sentences('error')}; {remedy}"
            raise UsageError(f"{report.name} holds no episode to learn from: {why}")

    def _faults(self, episode: Episode) -> Iterator[tuple[str, str, np.ndarray | None]]:
        """Yields the faults that the policy 'warn' tolerates: the fault, what is then done, the values to show."""
        named = [*self._form.observations(episode), *self._form.actions(episode)]
        for name, value in [*((name, value) for name, value, _ in named), ("reward", episode.rewards)]:
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                yield f"{name} is not finite", "", None
        if (episode.terminated | episode.truncated)[:-1].any():
            yield "it ends before its last step", ", and is split there", None
        for name, value, leaf in self._form.actions(episode):
            if _distance(value, leaf.space) > CLIPPED_SILENTLY:
                yield f"{name} is not in {leaf.space}", ", and clipped", value

    def _clipped(self, episode: Episode) -> Episode:
        """Returns the episode with Box actions clipped to their bounds."""
        clipped = []
        for name, value, leaf in self._form.actions(episode):
            distance = _distance(value, leaf.space)
            if distance > 0:
                box = specs.without_vast_bounds(leaf.space)
                value = np.clip(value, box.low, box.high).astype(leaf.dtype)
                if distance <= CLIPPED_SILENTLY:
                    self.report.add("mended", f"{name} is out of bounds by up to 1e-6: clipped", episode.id)
            clipped.append(value)
        return episode._replace(actions=nest.unflatten(nest.flatten(episode.actions)[1], clipped))


def _distance(values: np.ndarray, space: Any) -> float:
    """Returns the largest distance of values from a Box, relative to a bound's size where that is above 1."""
    if not isinstance(space, spaces.Box):
        return 0.0
    box = specs.without_vast_bounds(space)
    low, high = (bound.astype(np.float64) for bound in (box.low, box.high))
    with np.errstate(invalid="ignore"):  # of a bound at infinity nothing is out
        out = np.stack([(low - values) / np.fmax(1, np.abs(low)), (values - high) / np.fmax(1, np.abs(high))])
    return float(np.nan_to_num(out, nan=0).max(initial=0))


def _split(episode: Episode) -> Iterator[Episode]:
    """Yields the parts between ends.

    What follows an early end may be the next episode's first observation, so only the last part has a final one.
    """
    early = np.flatnonzero((episode.terminated | episode.truncated)[:-1]) if episode.length else ()
    if not len(early):
        yield episode
        return
    begin = 0
    for number, end in enumerate(early):
        part = slice(begin, end + 1)
        yield without_final_observation(
            f"{episode.id}[{number}]",
            nest.at(episode.observations, part),
            nest.at(episode.actions, part),
            *(values[part] for values in (episode.rewards, episode.terminated, episode.truncated)),
        )
        begin = end + 1
    rest = slice(begin, None)
    yield Episode(
        f"{episode.id}[{len(early)}]",
        nest.at(episode.observations, rest),
        nest.at(episode.actions, rest),
        *(values[rest] for values in (episode.rewards, episode.terminated, episode.truncated)),
    )
