"""Checks every episode before training, corrects faults with a unique correction, and reports all others.

Four kinds of findings:
1. errors of form: a missing field, lengths that do not fit, a different nest or shape, a dtype that cannot be cast, an
   unreadable episode, a Discrete, MultiDiscrete or MultiBinary value out of range, an action that its mask forbids. An
   episode with such an error can never be used.
2. errors of content, which `policy = 'warn'` lets pass: values that are not finite (kept), an end before the last step
   (the episode is split there), Box actions out of bounds (clipped).
3. corrected faults: values of another dtype (cast), a step that is both terminated and truncated (counts as
   terminated), a last step that is neither (counts as truncated), T observations instead of T+1 (see
   `without_final_observation`), Box actions out of bounds by up to 1e-6 (clipped), empty episodes (left out).
4. warnings: see `Survey.warn`.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from alfish import nest, specs
from alfish.errors import UsageError
from alfish.offline.data_report import DataReport
from alfish.offline.episode import Episode, Unreadable, without_final_observation
from alfish.offline.form import EpisodeForm, UnusableError
from alfish.offline.recorded_spaces import NO_SPACES, Spaces
from alfish.specs.checks import with_rounding


class Survey:
    """Counts valid episodes, and adds warnings at the end.

    Args:
      form: form of the episodes.
      report: report that receives the counts and the warnings.
    """

    def __init__(self, form: EpisodeForm, report: DataReport):
        self._form, self._report = form, report
        self._num_beginnings: dict[bytes, int] = {}  # number of episodes for each digest of a first observation
        self._all_rewards_zero = True
        # Number of action entries that are at a bound, and number of action entries that have bounds.
        self._num_at_bounds = self._num_bounded = 0
        self._num_outside: dict[str, int] = {}  # number of episodes with values out of bounds, by observation
        self._longest = 0

    def add(self, episode: Episode) -> None:
        """Counts an episode with at least one transition."""
        observations, actions = list(self._form.observations(episode)), list(self._form.actions(episode))
        ranges = [(name, np.fmin.reduce(value), np.fmax.reduce(value)) for name, value, _ in observations + actions]
        ranges.append(("reward", np.fmin.reduce(episode.rewards), np.fmax.reduce(episode.rewards)))
        return_ = float(episode.rewards.sum(dtype=np.float64))
        self._report.count(episode.length, return_, bool(episode.terminated[-1]), ranges)
        self._longest = max(self._longest, episode.length)
        for (name, low, high), (_, _, leaf) in zip(ranges, observations):
            if _exceeds(low, high, leaf.space):
                self._num_outside[name] = self._num_outside.get(name, 0) + 1
        self._all_rewards_zero &= not episode.rewards.any()
        digest = hashlib.blake2b(b"".join(value[0].tobytes() for _, value, _ in observations), digest_size=8).digest()
        self._num_beginnings[digest] = self._num_beginnings.get(digest, 0) + 1
        for _, value, leaf in actions:
            if isinstance(leaf.space, spaces.Box) and specs.is_bounded(leaf.space):
                self._num_bounded += value.size
                self._num_at_bounds += int(((value <= leaf.space.low) | (value >= leaf.space.high)).sum())

    def warn(self) -> None:
        """Adds warnings to the report.

        The warnings name action entries at their bounds, which a tanh policy never reaches; action entries that never
        change; observations out of bounds; rewards that are all 0; episodes of one step each; and episodes that begin
        with the same observation, as with a single seed.
        """
        warn = self._report.add
        if self._num_at_bounds:
            warn(
                "warning",
                f"{self._num_at_bounds:,} of {self._num_bounded:,} entries of actions are exactly at a bound, which a "
                "tanh policy cannot reach: they are trained as slightly smaller values",
            )
        for name in self._form.action_names():
            low, high = (np.atleast_1d(end) for end in self._report.range_of(name) or (0, 1))
            constant = [str(i) for i in np.flatnonzero(low == high)]
            if constant and len(constant) == low.size:
                warn("warning", f"{name} never changes")
            elif constant:
                warn("warning", f"{name} never changes in its entries {', '.join(constant)}")
        for name, count in self._num_outside.items():
            warn(
                "warning",
                f"{name} has values out of the bounds of its space in {count:,} of {self._report.num_kept:,} episodes; "
                "do the data belong to this environment?",
            )
        if self._longest == 1 and self._report.num_kept > 1:
            warn("warning", "each episode has a single step; are the flags of terminations inverted?")
        if self._all_rewards_zero:
            warn("warning", "all rewards are 0")
        alike = sum(count for count in self._num_beginnings.values() if count > 1)
        if alike:
            warn(
                "warning",
                f"{alike:,} of {self._report.num_kept:,} episodes begin with the same observation as another episode; "
                "were they recorded with the same seed?",
            )


def _exceeds(low: Any, high: Any, space: spaces.Space) -> bool:
    """Returns whether values from `low` to `high` are out of the bounds of a space, by more than rounding errors."""
    if not isinstance(space, spaces.Box):
        return False  # values of other spaces are checked before
    box = specs.without_vast_bounds(space)
    least, most = with_rounding(box.low, box.high)
    return bool((low < least).any() or (high > most).any())


POLICIES = ("raise", "drop_episode", "warn")
MISFIT_FRACTION = 0.9  # with at least this fraction of faulty episodes, the environment is probably the wrong one
NO_ENVIRONMENT = "give the environment of these data with --env_id (OfflineBuffer.env_id), or write the data again"
OTHER_ENVIRONMENT = (
    "they do not fit the given environment: give the one that they were recorded in, with the same wrappers, or write "
    "the data again"
)
CLIPPED_SILENTLY = 1e-6  # about the rounding error of unit conversions in float32


class Validator:
    """Checks episodes one by one.

    Args:
      spaces: spaces that the data must fit; where a space is None, later episodes must have the form of the first.
      policy: treatment of faulty episodes: with 'raise', `finish` raises an error after all episodes were read;
        'drop_episode' leaves out faulty episodes; 'warn' leaves out only unusable episodes.
      report: report to write to.
      is_named: whether the spaces come from an environment that the user named.

    Raises:
      UsageError: `policy` is not one of `POLICIES`, or a space is not supported.
    """

    def __init__(
        self,
        spaces: Spaces = NO_SPACES,
        policy: str = "raise",
        report: DataReport | None = None,
        is_named: bool = False,
    ):
        if policy not in POLICIES:
            raise UsageError(f"the policy for faulty episodes is {policy!r}; it must be one of {', '.join(POLICIES)}")
        self._policy = policy
        self.report = DataReport() if report is None else report
        self._form = EpisodeForm(spaces, self.report)
        self._survey = Survey(self._form, self.report)
        self._misfit_remedy = OTHER_ENVIRONMENT if is_named else NO_ENVIRONMENT
        self._num_unreadable = 0

    def check(self, item: Episode | Unreadable) -> Iterator[Episode]:
        """Yields the usable parts of an episode: none, the whole episode, or its parts between early ends."""
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
                self.report.add("mended", "it is empty and left out", part.id)

    def finish(self) -> None:
        """Adds the warnings of `Survey`; called after the last episode.

        Raises:
          UsageError: `policy` is 'raise' and an episode has an error, or no episode is usable.
        """
        report = self.report
        if report.num_kept:
            self._survey.warn()
        if report.found("error") and self._policy == "raise":
            remedy = (
                "fix the data, or leave these episodes out with OfflineBuffer.policy = 'drop_episode' in training, or "
                "--policy=drop_episode of `alfish import`"
            )
            if report.num_bad - self._num_unreadable >= MISFIT_FRACTION * report.num_read:
                remedy = self._misfit_remedy
            raise UsageError(
                f"{report.name}: {report.num_bad:,} of {report.num_read:,} episodes cannot be used: "
                f"{report.sentences('error')}; {remedy}"
            )
        if not report.num_kept:
            why = report.sentences("mended") or "there is none"
            if report.found("error"):
                remedy = (
                    "write or download them again" if self._num_unreadable == report.num_bad else self._misfit_remedy
                )
                why = f"{report.sentences('error')}; {remedy}"
            raise UsageError(f"{report.name} has no usable episode: {why}")

    def _faults(self, episode: Episode) -> Iterator[tuple[str, str, np.ndarray | None]]:
        """Yields faults that `policy = 'warn'` tolerates: sentence, clause about the treatment, and values to show."""
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
    """Returns the largest distance of values from a Box, divided by the bound's absolute value if that exceeds 1."""
    if not isinstance(space, spaces.Box):
        return 0.0
    box = specs.without_vast_bounds(space)
    low, high = (bound.astype(np.float64) for bound in (box.low, box.high))
    with np.errstate(invalid="ignore"):  # an infinite bound gives nan, which counts as 0: no value exceeds it
        out = np.stack([(low - values) / np.fmax(1, np.abs(low)), (values - high) / np.fmax(1, np.abs(high))])
    return float(np.nan_to_num(out, nan=0).max(initial=0))


def _split(episode: Episode) -> Iterator[Episode]:
    """Yields the parts into which early ends split an episode.

    The observation after an early end may belong to the next episode, so only the last part has a recorded final
    observation.
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
