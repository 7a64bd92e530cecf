"""Recorded data: read from files, validated, and stored as read-only rows of the stream.

A source yields episodes in the environment's units (`episode`, `sources`). The validator corrects them where that has
one right answer, and reports every fault (`validation`). `OfflineBuffer` stores them as the rows that replay stores.
Outside this package and `environments`, nothing uses `terminated`, `truncated` or `next_observations`.
"""

from alfish.offline.buffer import OfflineBuffer
from alfish.offline.data_set import DataSetWriter
from alfish.offline.episode import Arrays, Episode, EpisodeSource
from alfish.offline.outputs import MinariWriter, open_writer
from alfish.offline.reading import Reading
from alfish.offline.report import Report
from alfish.offline.sources import open_source
from alfish.offline.spaces import Spaces
from alfish.offline.validation import Validator
from alfish.offline.writer import EpisodeWriter

__all__ = [
    "Arrays",
    "DataSetWriter",
    "Episode",
    "EpisodeSource",
    "EpisodeWriter",
    "MinariWriter",
    "OfflineBuffer",
    "Reading",
    "Report",
    "Spaces",
    "Validator",
    "open_source",
    "open_writer",
]
