"""Recorded data: read from files, validated, and stored as read-only time steps.

A source yields episodes in the environment's units (`episode`, `sources`). The validator reports every fault, and
corrects a fault if only one correction is possible (`validation`). `OfflineBuffer` stores episodes as rows, as replay
does. Only this package and `environments` use `terminated`, `truncated` and `next_observations`.
"""

from alfish.offline.buffer import OfflineBuffer
from alfish.offline.data_report import DataReport
from alfish.offline.data_set import DataSetWriter, EpisodeWriter
from alfish.offline.episode import Arrays, Episode, EpisodeSource
from alfish.offline.outputs import MinariWriter, open_writer
from alfish.offline.recorded_spaces import Spaces
from alfish.offline.source_reading import SourceReading
from alfish.offline.sources import open_source
from alfish.offline.validation import Validator

__all__ = [
    "Arrays",
    "DataSetWriter",
    "Episode",
    "EpisodeSource",
    "EpisodeWriter",
    "MinariWriter",
    "OfflineBuffer",
    "SourceReading",
    "DataReport",
    "Spaces",
    "Validator",
    "open_source",
    "open_writer",
]
