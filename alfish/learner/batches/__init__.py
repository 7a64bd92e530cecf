"""Sources of batches for the learner. The source makes training on-policy, off-policy or offline.

A source yields `Minibatches`: rows, and the indices of several minibatches in these rows.

- `epochs` (on-policy): the rows of each unroll.
- `phasic` (on-policy): the rows of each unroll, and in auxiliary phases the rows of the last unrolls.
- `replay` (off-policy): windows from replay, optionally mixed with recorded data.
- `offline`: windows of recorded data only.
"""

from alfish.learner.batches.batches import Batches, Minibatches, take
from alfish.learner.batches.epochs import EpochBatches
from alfish.learner.batches.offline import OfflineBatches
from alfish.learner.batches.phasic import PhasicBatches
from alfish.learner.batches.replay import ReplayBatches

__all__ = ["Batches", "Minibatches", "EpochBatches", "OfflineBatches", "PhasicBatches", "ReplayBatches", "take"]
