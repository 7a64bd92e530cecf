"""The episodes of a reading that a buffer keeps: those that fit, the best of them, and those held out."""

import math

import numpy as np
from absl import logging

from alfish.errors import UsageError
from alfish.formatting import counted
from alfish.offline.episode import Episode
from alfish.offline.reading import Reading


def selected(
    reading: Reading, length: int | None, top_fraction: float, holdout_fraction: float
) -> tuple[list[Episode], list[Episode]]:
    """Returns the episodes to train on, and those held out, both in the order of the sources.

    Args:
      reading: of the sources; read to its end.
      length: rows that all episodes may have together; the report names the episodes that do not fit. None: no limit.
      top_fraction: of the episodes that fit, in (0, 1]; those with the greatest returns.
      holdout_fraction: of the episodes that remain, in [0, 1); held out at even distances.

    Raises:
      UsageError: no episode fits, or none is left to train on.
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


def _fitting(reading: Reading, length: int | None) -> list[Episode]:
    """Returns the first episodes that have at most `length` rows together."""
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
        report.add("warning", f"it does not fit in OfflineBuffer.length = {length:,} rows, and is left out", id)
    if not fitting:
        raise UsageError(
            f"OfflineBuffer.length is {length}, and the first episode of {report.name} has more rows; raise it"
        )
    return fitting


def _best(episodes: list[Episode], fraction: float) -> list[Episode]:
    """Returns the episodes with the greatest undiscounted returns, in their order."""
    if fraction < 1 and episodes[0].rewards.ndim > 1:
        raise UsageError(
            "OfflineBuffer.top_fraction ranks episodes by their returns, and these rewards are vectors of "
            f"{episodes[0].rewards.shape[1]}; set it to 1, or choose episodes when they are recorded"
        )
    number = max(1, round(fraction * len(episodes)))
    returns = np.array([episode.rewards.sum(dtype=np.float64) for episode in episodes])
    return [episodes[i] for i in sorted(np.argsort(-returns, kind="stable")[:number])]


def _split(episodes: list[Episode], fraction: float, name: str) -> tuple[list[Episode], list[Episode]]:
    """Returns the episodes to train on, and those held out, which stand at even distances."""
    number = math.ceil(fraction * len(episodes))
    if number and number >= len(episodes):
        raise UsageError(
            f"OfflineBuffer.holdout_fraction is {fraction}, and {name} has {len(episodes)} episodes to split; lower it"
        )
    held_out = {int((k + 0.5) * len(episodes) / number) for k in range(number)}
    return [e for i, e in enumerate(episodes) if i not in held_out], [episodes[i] for i in sorted(held_out)]
