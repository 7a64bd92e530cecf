"""A report on data: counts, ranges, returns, and each finding with its episodes."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from alfish.errors import counted, printable

LEVELS = ("error", "mended", "warning", "note")  # "mended" is for faults that were corrected
NUM_SHOWN = 5  # maximum number of episode ids in one line
NUM_BINS = 10
MAX_WORDS = 600  # maximum number of characters of a finding, because names in a file may have any length


class DataReport:
    """Collects findings while episodes are read; `str` returns a page of text.

    Attributes:
      num_read: number of episodes in the sources, including unreadable episodes.
      num_kept: number of valid episodes; each part of a split episode counts.
      num_transitions, num_terminated, num_truncated: numbers of transitions, terminations and truncations in the valid
        episodes.
    """

    def __init__(self, name: str = "the data"):
        self.name = name
        self.num_read = self.num_kept = self.num_transitions = self.num_terminated = self.num_truncated = 0
        self._found: dict[tuple[str, str], list[str]] = {}
        self._found_in: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}  # range of a finding's values
        self._bad: set[str] = set()
        self._ranges: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._returns: list[float] = []
        self._lengths: list[int] = []

    def add(self, level: str, what: str, episode_id: str | None = None, values: np.ndarray | None = None) -> None:
        """Adds a finding; findings with the same text share a line.

        Args:
          level: level of the finding, one of `LEVELS`.
          what: text that completes "episode 7: ...", or a sentence that is not about a single episode.
          episode_id: id of the episode that the text concerns.
          values: values `[T, ...]` that the finding is about; the report shows their range. None shows no range.
        """
        assert level in LEVELS
        what = printable(what)
        what = what if len(what) <= MAX_WORDS else f"{what[:MAX_WORDS]}..."
        ids = self._found.setdefault((level, what), [])
        if episode_id is not None:
            episode_id = printable(episode_id)[:MAX_WORDS]
            ids.append(episode_id)
            if level == "error":
                self._bad.add(episode_id)
        if values is not None:
            low, high = np.fmin.reduce(values), np.fmax.reduce(values)
            self._found_in[level, what] = _widened(self._found_in.get((level, what)), low, high)

    def count(self, length: int, return_: float, terminated: bool, ranges: Iterable[tuple[str, Any, Any]]) -> None:
        """Counts a valid episode; `ranges` has the name, the smallest value and the largest value of each leaf."""
        self.num_kept += 1
        self.num_transitions += length
        self.num_terminated += terminated
        self.num_truncated += not terminated
        self._lengths.append(length)
        self._returns.append(return_)
        for name, low, high in ranges:
            self._ranges[name] = _widened(self._ranges.get(name), low, high)

    def found(self, level: str) -> dict[str, list[str]]:
        """Returns the findings of one level: a dict from a finding's text to the ids of its episodes."""
        return {what: ids for (at, what), ids in self._found.items() if at == level}

    @property
    def num_bad(self) -> int:
        """The number of episodes with errors."""
        return len(self._bad)

    def range_of(self, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the smallest and the largest value of each entry of a leaf; None if no valid episode has the leaf."""
        return self._ranges.get(name)

    @property
    def returns(self) -> list[float]:
        """The undiscounted return of each valid episode."""
        return self._returns

    def sentences(self, level: str, limit: int = 3) -> str:
        """Returns the first findings of a level as a clause: `observation is not finite (2 episodes: 3, 17)`."""
        parts = [self._said(level, what) + _about(ids) for what, ids in self.found(level).items()]
        more = f"; and {len(parts) - limit} more" if len(parts) > limit else ""
        return "; ".join(parts[:limit]) + more

    def as_dict(self) -> dict[str, Any]:
        """Returns the report in JSON's types, in which None replaces each number that is not finite."""
        return {
            "name": self.name,
            "num_read": self.num_read,
            "num_kept": self.num_kept,
            "num_transitions": self.num_transitions,
            "num_terminated": self.num_terminated,
            "num_truncated": self.num_truncated,
            "returns": _summary(self._returns),
            "lengths": _summary(self._lengths),
            "ranges": {name: [_plain(end) for end in _few(*ends)] for name, ends in self._ranges.items()},
            "found": [
                {"level": at, "what": self._said(at, what), "episodes": ids} for (at, what), ids in self._found.items()
            ],
        }

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {counted(self.num_read, 'episode')} read, {self.num_kept:,} kept, "
            f"{counted(self.num_transitions, 'transition')} ({self.num_terminated:,} terminated, "
            f"{self.num_truncated:,} truncated)"
        ]
        if self._lengths:
            shortest, longest, mean = min(self._lengths), max(self._lengths), np.mean(self._lengths)
            lines.append(f"  length      {shortest:,} to {longest:,}, mean {mean:,.1f}")
        lines += [f"  {name:<11} {_span(low, high)}" for name, (low, high) in self._ranges.items()]
        finite = np.array([value for value in self._returns if math.isfinite(value)])
        if finite.size:
            lines.append(f"  return      {finite.min():.6g} to {finite.max():.6g}, mean {finite.mean():.6g}")
            lines += _histogram(finite)
        for level in LEVELS:
            lines += [
                f"  {level:<11} {self._said(level, what)}{_about(ids)}" for what, ids in self.found(level).items()
            ]
        return "\n".join(lines)

    def _said(self, level: str, what: str) -> str:
        """Returns the text of a finding, with the range of its values if it has values."""
        found_in = self._found_in.get((level, what))
        return what if found_in is None else f"{what}: its values are {_span(*found_in)}"


def _widened(before: tuple[np.ndarray, np.ndarray] | None, low: Any, high: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the union of two ranges."""
    return (low, high) if before is None else (np.fmin(before[0], low), np.fmax(before[1], high))


def _about(ids: list[str]) -> str:
    if not ids:
        return ""
    more = ", ..." if len(ids) > NUM_SHOWN else ""
    return f" ({counted(len(ids), 'episode')}: {', '.join(ids[:NUM_SHOWN])}{more})"


def _span(low: np.ndarray, high: np.ndarray) -> str:
    low, high = _few(low, high)
    one, other = (", ".join(f"{value:.4g}" for value in end.reshape(-1)) for end in (low, high))
    return f"[{one}] to [{other}]" if low.size > 1 else f"{one} to {other}"


def _few(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the range of each entry if there are few entries, else the range over all entries."""
    low, high = np.asarray(low), np.asarray(high)
    return (low, high) if low.size <= 8 else (np.fmin.reduce(low, None), np.fmax.reduce(high, None))


def _histogram(values: np.ndarray) -> list[str]:
    counts, edges = np.histogram(values, NUM_BINS if values.min() < values.max() else 1)
    widest = counts.max()
    return [
        f"    {start:>11.5g} to {end:<11.5g} {'#' * math.ceil(40 * count / widest):<40} {count}"
        for count, start, end in zip(counts, edges, edges[1:])
    ]


def _summary(values: list[Any]) -> dict[str, Any]:
    if not values:
        return {"min": None, "max": None, "mean": None}
    array = np.asarray(values, np.float64)
    return {"min": _plain(array.min()), "max": _plain(array.max()), "mean": _plain(array.mean())}


def _plain(values: Any) -> Any:
    if isinstance(values, np.ndarray) and values.ndim:
        return [_plain(value) for value in values]
    number = values.item()
    return number if not isinstance(number, float) or math.isfinite(number) else None
