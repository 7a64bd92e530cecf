"""Statistics over all episodes of some data, and the warnings that only they together give."""

import hashlib

import numpy as np
from gymnasium import spaces

from alfish import specs
from alfish.offline.episode import Episode
from alfish.offline.form import EpisodeForm
from alfish.offline.report import Report


class Survey:
    """Counts episodes that passed, and warns at the end.

    Args:
      form: of the episodes.
      report: receives the counts and the warnings.
    """

    def __init__(self, form: EpisodeForm, report: Report):
        self._form, self._report = form, report
        self._num_beginnings: dict[bytes, int] = {}  # episodes by the digest of their first observation
        self._all_rewards_zero = True
        self._num_at_bounds = self._num_bounded = 0  # entries of actions

    def add(self, episode: Episode) -> None:
        """Counts an episode of at least one transition."""
        observations, actions = list(self._form.observations(episode)), list(self._form.actions(episode))
        ranges = [(name, np.fmin.reduce(value), np.fmax.reduce(value)) for name, value, _ in observations + actions]
        ranges.append(("reward", np.fmin.reduce(episode.rewards), np.fmax.reduce(episode.rewards)))
        return_ = float(episode.rewards.sum(dtype=np.float64))
        self._report.count(episode.length, return_, bool(episode.terminated[-1]), ranges)
        self._all_rewards_zero &= not episode.rewards.any()
        digest = hashlib.blake2b(b"".join(value[0].tobytes() for _, value, _ in observations), digest_size=8).digest()
        self._num_beginnings[digest] = self._num_beginnings.get(digest, 0) + 1
        for _, value, leaf in actions:
            if isinstance(leaf.space, spaces.Box) and specs.is_bounded(leaf.space):
                self._num_bounded += value.size
                self._num_at_bounds += int(((value <= leaf.space.low) | (value >= leaf.space.high)).sum())

    def warn(self) -> None:
        """Adds warnings to the report.

        They name action entries at their bounds, which a tanh policy never reaches; action entries that never change;
        rewards that are all 0; and episodes that begin alike, as with one seed.
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
        if self._all_rewards_zero:
            warn("warning", "all rewards are 0")
        alike = sum(count for count in self._num_beginnings.values() if count > 1)
        if alike:
            warn(
                "warning",
                f"{alike:,} of {self._report.num_kept:,} episodes begin with an observation that another begins with; "
                "were they recorded with one seed?",
            )
