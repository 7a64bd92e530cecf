"""Looks at every episode before anything learns from it, mends what has one right answer, and reports the rest.

Four kinds of findings:
1. errors of form: a missing field, lengths that do not fit, another nest or shape, a dtype that cannot be cast, an
   episode that cannot be read. Such an episode can never be used.
   Neither can one with a Discrete, MultiDiscrete or MultiBinary value out of its range.
2. errors of content, which the policy 'warn' lets pass: values that are not finite (kept), an end before the last step
   (the episode is split there), Box actions out of bounds (clipped).
3. mended: float64 and integers to the stream's dtypes, both flags (terminated), no flag at the end (truncated), T
   observations in place of T+1, Box actions outside by up to 1e-6 (clipped), empty episodes (left out).
4. warnings: see `Validator.finish`.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from alfish import nest, specs
from alfish.errors import UsageError
from alfish.nest import Nest
from alfish.offline.episode import Episode, Unreadable, without_final_observation
from alfish.offline.report import Report
from alfish.offline.spaces import NO_SPACES, Spaces

POLICIES = ("raise", "drop_episode", "warn")
MISFIT_SHARE = 0.9  # of the episodes; where so many have errors, the data are not what they are taken for
MISFIT_REMEDY = "name the environment of these data with --env_id (OfflineBuffer.env_id), or write them again"
CLIPPED_SILENTLY = 1e-6  # float32 rounds about as much in a conversion of units


@dataclass(frozen=True)
class _Leaf:
    """What a leaf is in each step."""

    shape: tuple[int, ...]
    dtype: np.dtype  # that it is kept in
    space: Any  # None: nobody has declared one


class _UnusableError(Exception):
    """An episode that cannot be rows; the message completes "episode 7: ..."."""


class Validator:
    """Checks episodes one by one.

    Args:
      spaces: that the data must fit; where one is None, the first episode says what the others must be like.
      policy: 'raise' reads everything, and `finish` raises if there was an error; 'drop_episode' leaves out episodes
        with errors; 'warn' leaves out only those that cannot be used.
      report: to write to.

    Raises:
      UsageError: there is no such policy, or a space that cannot be learned from.
    """

    def __init__(self, spaces: Spaces = NO_SPACES, policy: str = "raise", report: Report | None = None):
        if policy not in POLICIES:
            raise UsageError(f"the policy is {policy!r}; it is one of {', '.join(POLICIES)}")
        if spaces.observation is not None:
            specs.observation_spec(spaces.observation)  # raises where it is of no use, and says why
        if spaces.action is not None:
            specs.action_spec(spaces.action)
        self._policy = policy
        self.report = Report() if report is None else report
        self._leaves = {"observation": _leaves(spaces.observation), "action": _leaves(spaces.action)}
        self._reward_shape: tuple[int, ...] | None = None
        self._num_beginnings: dict[bytes, int] = {}  # episodes by the digest of their first observation
        self._all_rewards_zero = True
        self._num_at_bounds = self._num_bounded = 0  # entries of actions

    def check(self, item: Episode | Unreadable) -> Iterator[Episode]:
        """What of an episode may be used: one, none, or the parts of one that was split."""
        self.report.num_read += 1
        if isinstance(item, Unreadable):
            self.report.add("error", f"it is not readable: {item.reason}", item.id)
            return
        try:
            episode = self._mended(item)
        except _UnusableError as error:
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
                self._observe(part)
                yield part
            else:
                self.report.add("mended", "it is empty, and left out", part.id)

    def finish(self) -> None:
        """To be called after the last episode: warns of what only all of them tell.

        Actions at their bounds (which a tanh policy never reaches), action dimensions that never change, rewards that
        are all 0, and episodes that begin alike (recorded with one seed).

        Raises:
          UsageError: the policy is 'raise' and there was an error, or no episode is left.
        """
        report = self.report
        if report.num_kept:
            self._warn_of_the_whole()
        if report.found("error") and self._policy == "raise":
            remedy = "mend the data, or leave these episodes out with the policy 'drop_episode'"
            if report.num_bad >= MISFIT_SHARE * report.num_read:
                remedy = MISFIT_REMEDY
            raise UsageError(
                f"{report.name}: {report.num_bad:,} of {report.num_read:,} episodes are not fit to learn from: "
                f"{report.sentences('error')}; {remedy}"
            )
        if not report.num_kept:
            why = report.sentences("mended") or "there is none"
            if report.found("error"):
                why = f"{report.sentences('error')}; {MISFIT_REMEDY}"
            raise UsageError(f"{report.name} holds no episode to learn from: {why}")

    def _mended(self, episode: Episode) -> Episode:
        """The episode with arrays as they are kept and T+1 observations, its flags in order; its length may be 0."""
        for field in ("observations", "actions", "rewards", "terminated", "truncated"):
            value = getattr(episode, field)
            if value is None or not nest.leaves(value):
                raise _UnusableError(f"it has no {field}")
        rewards, length = self._rewards(episode), len(episode.rewards)
        terminated, truncated = _flags(episode.terminated, "terminated"), _flags(episode.truncated, "truncated")
        for label, leaf in (
            *nest.named_leaves(episode.observations, "observations"),
            *nest.named_leaves(episode.actions, "actions"),
        ):
            if not np.ndim(leaf):
                raise _UnusableError(f"{label} is one value, and an array of one for each step is expected")
        for name, values in (("actions", episode.actions), ("terminated", terminated), ("truncated", truncated)):
            for count in {len(leaf) for leaf in nest.leaves(values)} - {length}:
                raise _UnusableError(f"it has {length} rewards and {count} {name}")
        counts = {len(leaf) for leaf in nest.leaves(episode.observations)}
        num_observations = counts.pop()
        if counts or num_observations not in (length, length + 1) and length:
            raise _UnusableError(
                f"it has {' and '.join(map(str, sorted({num_observations, *counts})))} observations for {length} "
                f"actions, not {length + 1}"
            )
        observations = self._cast(episode.observations, "observation", episode.id)
        actions = self._cast(episode.actions, "action", episode.id)
        mended = Episode(episode.id, observations, actions, rewards, terminated, truncated)
        return self._completed(mended, num_observations) if length else mended

    def _completed(self, episode: Episode, num_observations: int) -> Episode:
        """The episode with flags that say how it ends, and with a final observation or a step less."""
        mend, id = self.report.add, episode.id
        if (episode.terminated & episode.truncated).any():
            mend("mended", "a step is both terminated and truncated: terminated", id)
            episode = episode._replace(truncated=episode.truncated & ~episode.terminated)
        if not (episode.terminated[-1] or episode.truncated[-1]):
            mend("mended", "no flag says how it ends: truncated", id)
            truncated = episode.truncated.copy()
            truncated[-1] = True
            episode = episode._replace(truncated=truncated)
        if num_observations > episode.length:
            return episode
        what = "the last one stands for it, since it terminated" if episode.terminated[-1] else "a step less is kept"
        mend("mended", f"its final observation is missing: {what}", id)
        return without_final_observation(*episode)

    def _rewards(self, episode: Episode) -> np.ndarray:
        rewards = np.asarray(episode.rewards)
        if rewards.dtype.kind not in "fiub":
            raise _UnusableError(f"its rewards are of dtype {rewards.dtype}, which cannot be made float32")
        if rewards.ndim == 2 and rewards.shape[1] == 1:
            rewards = rewards[:, 0]
        if rewards.ndim not in (1, 2):
            raise _UnusableError(f"its rewards have shape {list(rewards.shape)}, and [T] or [T, R] is expected")
        if self._reward_shape is None:
            self._reward_shape = rewards.shape[1:]
        if rewards.shape[1:] != self._reward_shape:
            one, other = list(rewards.shape[1:]), list(self._reward_shape)
            raise _UnusableError(f"its rewards have shape {one} in each step, and {other} is expected")
        if rewards.dtype != np.float32:
            self.report.add("mended", f"rewards of dtype {rewards.dtype} are made float32", episode.id)
        with np.errstate(over="ignore"):  # which the check for what is not finite tells
            return rewards.astype(np.float32)

    def _cast(self, values: Nest, kind: str, id: str) -> Nest:
        """The values with each leaf in the dtype that is kept."""
        values = nest.map(np.asarray, values)
        if self._leaves[kind] is None:
            self._leaves[kind] = nest.map(_guessed, values)
        leaves, there, here = self._leaves[kind], nest.paths(values), nest.paths(self._leaves[kind])
        if there != here:
            one, other = ("one array" if paths == [""] else ", ".join(paths) for paths in (there, here))
            raise _UnusableError(f"its {kind}s are {one}, and {other} is expected")
        cast = [
            self._cast_leaf(value, leaf, name, id)
            for (name, value), leaf in zip(nest.named_leaves(values, kind), nest.leaves(leaves))
        ]
        return nest.unflatten(nest.flatten(leaves)[1], cast)

    def _cast_leaf(self, value: np.ndarray, leaf: _Leaf, name: str, id: str) -> np.ndarray:
        if value.shape[1:] != leaf.shape:
            one, other = list(value.shape[1:]), list(leaf.shape)
            raise _UnusableError(f"{name} has shape {one} in each step, and {other} is expected")
        if value.dtype != leaf.dtype:
            if value.dtype.kind not in "fiub":
                raise _UnusableError(f"{name} is of dtype {value.dtype}, which cannot be made {leaf.dtype}")
            with np.errstate(over="ignore", invalid="ignore"):
                cast = value.astype(leaf.dtype)
            if leaf.dtype.kind != "f" and not np.array_equal(cast, value):
                raise _UnusableError(f"{name} is of dtype {value.dtype}, and {leaf.dtype} cannot hold its numbers")
            self.report.add("mended", f"{name} of dtype {value.dtype} is made {leaf.dtype}", id)
            value = cast
        outside = _out_of_range(value, leaf.space)
        if outside is not None:
            raise _UnusableError(f"{name} is {outside}, which is not in {leaf.space}")
        return value

    def _faults(self, episode: Episode) -> Iterator[tuple[str, str, np.ndarray | None]]:
        """What the policy 'warn' lets pass, what it then does about it, and the values where their range tells more."""
        named = [*self._named_leaves("observation", episode), *self._named_leaves("action", episode)]
        for name, value in [*((name, value) for name, value, _ in named), ("reward", episode.rewards)]:
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                yield f"{name} is not finite", "", None
        if (episode.terminated | episode.truncated)[:-1].any():
            yield "it ends before its last step", ", and is split there", None
        for name, value, leaf in self._named_leaves("action", episode):
            if _distance(value, leaf.space) > CLIPPED_SILENTLY:
                yield f"{name} is not in {leaf.space}", ", and clipped", value

    def _clipped(self, episode: Episode) -> Episode:
        """The episode with Box actions inside their bounds."""
        clipped = []
        for name, value, leaf in self._named_leaves("action", episode):
            distance = _distance(value, leaf.space)
            if distance > 0:
                value = np.clip(value, leaf.space.low, leaf.space.high).astype(leaf.dtype)
                if distance <= CLIPPED_SILENTLY:
                    self.report.add("mended", f"{name} is out of bounds by up to 1e-6: clipped", episode.id)
            clipped.append(value)
        return episode._replace(actions=nest.unflatten(nest.flatten(episode.actions)[1], clipped))

    def _observe(self, episode: Episode) -> None:
        """Counts an episode that passed."""
        observations = list(self._named_leaves("observation", episode))
        actions = list(self._named_leaves("action", episode))
        ranges = [(name, np.fmin.reduce(value), np.fmax.reduce(value)) for name, value, _ in observations + actions]
        ranges.append(("reward", np.fmin.reduce(episode.rewards), np.fmax.reduce(episode.rewards)))
        return_ = float(episode.rewards.sum(dtype=np.float64))
        self.report.count(episode.length, return_, bool(episode.terminated[-1]), ranges)
        self._all_rewards_zero &= not episode.rewards.any()
        digest = hashlib.blake2b(b"".join(value[0].tobytes() for _, value, _ in observations), digest_size=8).digest()
        self._num_beginnings[digest] = self._num_beginnings.get(digest, 0) + 1
        for _, value, leaf in actions:
            if isinstance(leaf.space, spaces.Box) and leaf.space.is_bounded("both"):
                self._num_bounded += value.size
                self._num_at_bounds += int(((value <= leaf.space.low) | (value >= leaf.space.high)).sum())

    def _warn_of_the_whole(self) -> None:
        warn = self.report.add
        if self._num_at_bounds:
            warn(
                "warning",
                f"{self._num_at_bounds:,} of {self._num_bounded:,} entries of actions are exactly at a bound, which a "
                "tanh policy cannot reach: they are trained on as a hair less",
            )
        for name, _ in nest.named_leaves(self._leaves["action"], "action"):
            low, high = (np.atleast_1d(end) for end in self.report.range_of(name) or (0, 1))
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
                f"{alike:,} of {self.report.num_kept:,} episodes begin with an observation that another begins with; "
                "were they recorded with one seed?",
            )

    def _named_leaves(self, kind: str, episode: Episode) -> Iterator[tuple[str, np.ndarray, _Leaf]]:
        values = episode.observations if kind == "observation" else episode.actions
        for (name, value), leaf in zip(nest.named_leaves(values, kind), nest.leaves(self._leaves[kind])):
            yield name, value, leaf


def _leaves(space: spaces.Space | None) -> Nest:
    """A `_Leaf` for each leaf of a space that can be learned from."""
    if space is None:
        return None
    return specs.map_space(lambda leaf: _Leaf(tuple(leaf.shape), _kept_dtype(leaf.dtype), leaf), space)


def _guessed(values: np.ndarray) -> _Leaf:
    """What a leaf of all other episodes must be like, where nobody has declared it."""
    return _Leaf(values.shape[1:], _kept_dtype(values.dtype), None)


def _kept_dtype(dtype: Any) -> np.dtype:
    """The dtype that is kept: no float of the stream is wider than float32."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.kind == "f" else dtype


def _flags(flags: Any, name: str) -> np.ndarray:
    flags = np.asarray(flags)
    if flags.ndim == 2 and flags.shape[1] == 1:
        flags = flags[:, 0]
    if flags.ndim != 1 or flags.dtype.kind not in "biuf":
        raise _UnusableError(
            f"{name} has shape {list(flags.shape)} and dtype {flags.dtype}; each step needs one number, 0 or 1"
        )
    other = flags[(flags != 0) & (flags != 1)]
    if len(other):
        raise _UnusableError(f"{name} holds {other[0]}; each step needs 0 or 1")
    return flags.astype(bool)


def _out_of_range(values: np.ndarray, space: Any) -> Any:
    """A value that a space of whole numbers does not have; None: there is none."""
    if isinstance(space, spaces.Discrete):
        low, count = space.start, space.n
    elif isinstance(space, spaces.MultiDiscrete):
        low, count = space.start, space.nvec
    elif isinstance(space, spaces.MultiBinary):
        low, count = np.int64(0), np.int64(2)
    else:
        return None
    outside = (values < low) | (values >= low + count)
    return values[outside].flat[0] if outside.any() else None


def _distance(values: np.ndarray, space: Any) -> float:
    """How far values are out of a Box, at most, as a share of a bound's size where that is above 1."""
    if not isinstance(space, spaces.Box):
        return 0.0
    low, high = (bound.astype(np.float64) for bound in (space.low, space.high))
    with np.errstate(invalid="ignore"):  # of a bound at infinity nothing is out
        out = np.stack([(low - values) / np.fmax(1, np.abs(low)), (values - high) / np.fmax(1, np.abs(high))])
    return float(np.nan_to_num(out, nan=0).max(initial=0))


def _split(episode: Episode) -> Iterator[Episode]:
    """The parts between ends. What follows an early end may be the next episode's first observation, so no part but
    the last has a final observation."""
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
