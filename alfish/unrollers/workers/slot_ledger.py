"""The account of slots: which are free, granted, ready and in use."""

from collections import Counter

from alfish.processes.messages import Segment


class SlotLedger:
    """Keeps the state of every slot, and the segments in them.

        free -> granted: its worker writes it -> ready: it holds a segment -> in use: an iteration trains on it -> free

    A slot of a worker that has died goes from granted to free.

    Args:
      num_workers: workers.
      slots: slots of each worker. Worker i has the slots from `i * slots` on.

    Attributes:
      ready: segments that no unroll has taken yet, in the order in which they came.
      in_use: segments that the last unroll has taken and not given back.
    """

    def __init__(self, num_workers: int, slots: int):
        self.slots = slots
        self.ready: list[Segment] = []
        self.in_use: list[Segment] = []
        self._free = [list(range(i * slots, (i + 1) * slots)) for i in range(num_workers)]
        self._granted: list[set[int]] = [set() for _ in range(num_workers)]
        self._next_sequence = [0] * num_workers  # `Segment.sequence` of each worker's next segment

    def next_free(self, worker_index: int) -> int | None:
        """Returns the slot of the worker to grant next; None: it has none that is free."""
        free = self._free[worker_index]
        return free[-1] if free else None

    def is_idle(self, worker_index: int) -> bool:
        """Returns True if the worker has no slot to fill, and no segment of it waits to be taken."""
        return not self._granted[worker_index] and all(segment.worker_index != worker_index for segment in self.ready)

    def grant(self, worker_index: int) -> None:
        """Moves `next_free` from free to granted."""
        self._granted[worker_index].add(self._free[worker_index].pop())

    def fill(self, segment: Segment) -> None:
        """Moves the segment's slot from granted to ready."""
        worker_index = segment.worker_index
        assert segment.sequence == self._next_sequence[worker_index], "a segment was lost or doubled"
        assert segment.slot in self._granted[worker_index], "a segment came in a slot that was not granted"
        self._next_sequence[worker_index] += 1
        self._granted[worker_index].remove(segment.slot)
        self.ready.append(segment)

    def take(self, most: int | None = None, most_of_each: int | None = None) -> list[Segment]:
        """Moves the oldest segments from ready to in use.

        Args:
          most: number of segments at most; None: all.
          most_of_each: number of each worker's segments at most; None: all.

        Returns:
          These segments, the oldest first.
        """
        taken: list[Segment] = []
        left: list[Segment] = []
        num_taken = Counter[int]()
        for segment in self.ready:
            is_taken = (most is None or len(taken) < most) and (
                most_of_each is None or num_taken[segment.worker_index] < most_of_each
            )
            num_taken[segment.worker_index] += is_taken
            (taken if is_taken else left).append(segment)
        self.ready = left
        self.in_use += taken
        return taken

    def release(self) -> None:
        """Moves all slots that are in use to free."""
        for segment in self.in_use:
            self._free[segment.worker_index].append(segment.slot)
        self.in_use = []

    def on_death(self, worker_index: int) -> None:
        """Moves the worker's granted slots to free. The segments that it has filled stay."""
        self._free[worker_index] = sorted([*self._free[worker_index], *self._granted[worker_index]])
        self._granted[worker_index].clear()
        self._next_sequence[worker_index] = 0

    def check_valid(self) -> None:
        """Asserts that each slot is in exactly one state, among those of its own worker."""
        for i, free in enumerate(self._free):
            held = [segment.slot for segment in (*self.ready, *self.in_use) if segment.worker_index == i]
            own = range(i * self.slots, (i + 1) * self.slots)
            assert sorted([*free, *self._granted[i], *held]) == list(own), f"slots of worker {i} were lost or doubled"
