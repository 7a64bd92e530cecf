"""Sources of the learner's batches, which determine the mode of training; a gin file selects one.

A source yields `Minibatches`: rows, and the indices of several minibatches within them, so that the learner may gather
and train all of them in one call. `epochs` trains on the unroll itself and `phasic` also on the last unrolls, in an
auxiliary phase (on-policy); `replay` trains on windows of a replay, optionally mixed with recorded data (off-policy),
and `offline` on recorded data only.
"""

from alfish.learner.batches.batches import Batches, Minibatches, take
from alfish.learner.batches.epochs import EpochBatches
from alfish.learner.batches.offline import OfflineBatches
from alfish.learner.batches.phasic import PhasicBatches
from alfish.learner.batches.replay import ReplayBatches

__all__ = ["Batches", "Minibatches", "EpochBatches", "OfflineBatches", "PhasicBatches", "ReplayBatches", "take"]
