"""The cut of stragglers: a learner ends its unroll early where enough others have ended theirs.

An iteration waits for the slowest learner, because gradients are summed over all. With the cut, the others wait no
longer than a vector step once a fraction of them has finished, and the rows that a learner did not collect are PAD. All
means are over the rows of all learners, so each row that was collected has the same weight.

Source: Wijmans et al., 2020 (DD-PPO), section 3.
"""

import math
from collections.abc import Iterator

from alfish import replicas
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.errors import UsageError

# Of an unroll, that no learner ends before. Many unrolls of a few rows each would be poor gradients.
LEAST_FRACTION = 0.25


class StragglerCut:
    """Yields the steps of unrolls up to the cut.

    Args:
      fraction: of the learners; when so many have finished an unroll, the others end theirs.
      algorithm: that acts in the unrolls.

    Raises:
      UsageError: the algorithm is off-policy.
    """

    def __init__(self, fraction: float, algorithm: RLAlgorithm):
        if not algorithm.on_policy:
            raise UsageError(
                f"SyncUnroller.sync_fraction is {fraction}, and {type(algorithm).__name__} is off-policy, so that "
                "learners may take rows from replay while others collect; leave it out"
            )
        self._fraction = fraction
        self._finished: replicas.Counter | None = None  # by all learners, of all unrolls
        self._num_before = 0  # unrolls that all have finished before this one

    def check(self) -> None:
        """Checks that there are learners to cut.

        Raises:
          UsageError: there is one learner, or too few for the fraction.
        """
        size = replicas.size()
        if size == 1:
            raise UsageError(
                f"SyncUnroller.sync_fraction is {self._fraction}, and there is one learner, which waits for no other; "
                "start several with torchrun, or leave it out"
            )
        if self._num_enough() == size:
            raise UsageError(
                f"SyncUnroller.sync_fraction is {self._fraction}, and {size} learners are cut only once all have "
                f"finished; take {math.floor(100 * (size - 1) / size) / 100} at most, or leave it out"
            )

    def steps(self, length: int) -> Iterator[int]:
        """Yields 0, 1, ... for each vector step of an unroll of `length` rows, until enough others have finished."""
        if self._finished is None:
            self.check()
            self._finished = replicas.Counter()
        enough = self._num_before + self._num_enough()
        at_least = max(1, math.ceil(LEAST_FRACTION * length))
        for t in range(length):
            if t >= at_least and self._finished.add(0) >= enough:
                return
            yield t

    def finish(self) -> None:
        """Counts an unroll of this learner as finished. The next one begins after all learners have called this."""
        assert self._finished is not None
        self._finished.add(1)
        self._num_before += replicas.size()

    def _num_enough(self) -> int:
        return math.ceil(self._fraction * replicas.size() - 1e-9)  # 0.7 * 10 is above 7
