"""Where the learner's batches come from: the mode of training, as an object that a gin file injects.

A source yields chunks: rows laid out once, and the indices of several minibatches within them. So a learner may gather
and train a whole chunk in one call. On-policy the unroll itself (`epochs`), off-policy windows of a replay, alone or
mixed with windows of data that others recorded (`replay`), and these data alone (`offline`).
"""

from alfish.batches.batches import Batches, Minibatches, take
from alfish.batches.epochs import EpochBatches
from alfish.batches.offline import OfflineBatches
from alfish.batches.replay import ReplayBatches

__all__ = ["Batches", "Minibatches", "EpochBatches", "OfflineBatches", "ReplayBatches", "take"]
