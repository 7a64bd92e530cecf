"""Measures what Ray costs the trainer's processor: the inputs of `benchmarks.cost_model` that belong to a machine.

  python -m benchmarks.ray_costs       # on an idle machine; half a minute

Prints the milliseconds of processor time of this process, all its threads together: of a call and its reply, of a reply
with a segment, beyond that, and of a publication of weights.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import tables
from benchmarks.ray_nodes import Nodes

ROWS = 256  # of a segment
SMALL, FRAME = 64, 7200  # bytes of a row: small vectors, and a frame
WEIGHTS = (300_000, 6_800_000)  # bytes
BATCHES, CALLS = 9, 20


class Worker:
    """Answers as a host does: a reply is a value with the leaves of a segment."""

    def poll(self, num_bytes: int) -> np.ndarray:
        return np.zeros(num_bytes, np.uint8)


def milliseconds(call: Callable[[], Any]) -> float:
    """Returns processor time of this process for a call: the median of some means."""
    means = []
    for _ in range(BATCHES + 1):  # the first one is not counted
        began = time.process_time()
        for _ in range(CALLS):
            call()
        means.append((time.process_time() - began) / CALLS * 1e3)
    return statistics.median(means[1:])


def costs() -> dict[str, float]:
    """Returns the milliseconds of each input, on a cluster of this machine."""
    nodes = Nodes((1,))
    try:
        import ray

        ray.init(nodes.address, log_to_driver=False, logging_level=logging.WARNING)
        actor: Any = ray.remote(Worker)
        worker = actor.options(num_cpus=1).remote()

        def poll(num_bytes: int) -> float:
            return milliseconds(lambda: ray.get(worker.poll.remote(num_bytes)))

        def put(num_bytes: int) -> float:
            weights = np.zeros(num_bytes, np.uint8)
            return milliseconds(lambda: ray.put(weights))

        call = poll(0)
        found = {"a call and its reply": call}
        for name, size in (("small rows", SMALL), (f"frames of {FRAME:,} bytes", FRAME)):
            found[f"a segment of {ROWS} {name}"] = max(poll(ROWS * size) - call, 0.0)
        for size in WEIGHTS:
            found[f"a publication of {size:,} bytes"] = put(size)
        return found
    finally:
        nodes.close()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(tables.header(["of the trainer", "ms of its processor"]))
    for name, value in costs().items():
        print(tables.line([name, f"{value:.2f}"]))


if __name__ == "__main__":
    main()
