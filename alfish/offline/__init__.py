"""Data made elsewhere: read from files, checked, and kept as rows of the stream that nobody writes again.

A source yields episodes in the environment's own units (`episode`, `sources`), the validator reports on them and mends
what can be mended (`validation`), and `OfflineBuffer` holds them as the same rows that replay does. Like
`environments`, this room is a door: `terminated`, `truncated` and `next_observations` are known in here, and nowhere
past it.
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
