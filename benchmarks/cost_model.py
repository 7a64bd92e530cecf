"""Simulates how many rows per second workers on Ray bring, from a few measured times. Trains nothing, needs no Ray.

  python -m benchmarks.cost_model                                       # the cases of docs/scale.md
  python -m benchmarks.cost_model --rate=450 --train_us=14 --rows=256   # your own; docs/scale.md says how

W workers make `rate` rows/s each, in segments. The trainer waits for the segments of an iteration, reads them, trains
for `train_us` on each row, and sends weights and grants to each host, one call at a time. Workers have two slots each.
`python -m benchmarks.ray_costs` measures all of these times for the cases of docs/scale.md. Of your own run,
`alfish train --profile` measures `train_us`, and `--throughput_limits` the rate.
"""

import argparse
import heapq
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import tables
from benchmarks.ray_costs import ROWS, RUNS, TABLE, WEIGHTS

WORKERS_PER_HOST = 32
SLOTS = 2
SPREAD = 0.1  # standard deviation of the logarithm of a segment's duration
WORKERS = (16, 64, 256, 1000)
GPU_TRAIN_US = 20.0  # assumed: convolutions are trained on a GPU, which the measurements do not use


class Case(NamedTuple):
    """Inputs of the simulation."""

    name: str
    rate: float  # rows/s of one worker
    train_us: float  # of the trainer for each row, all epochs or updates included
    rows: int  # of a segment
    segment_ms: float  # of the trainer for each segment that is received and joined
    weights_ms: float  # of the trainer for each publication
    call_ms: float  # of the trainer for each host and iteration: a call with grants, and a reply


def cases() -> list[Case]:
    """Returns the cases of docs/scale.md, from what `benchmarks.ray_costs` has measured."""
    found = {row["what"]: float(row["value"]) for row in tables.read_rows(TABLE)}
    small, frames = (found[f"a segment, {name}"] for name in ("CartPole", "frames of 7 kB"))
    light, heavy = (found[f"a publication of {size:,} bytes"] for size in WEIGHTS)
    slow, cheap, emulator = (
        found[f"one worker, {name}"] for name in ("CartPole, 2 ms a step", "CartPole", "frames of 7 kB, 1 ms a step")
    )
    appo, sac = (found[f"training on a row, {name}"] for name in RUNS)
    call = found["a call and its reply"]
    return [
        Case("2 ms environment, APPO, small rows", slow, appo, ROWS, small, light, call),
        Case("cheap environment, APPO, small rows", cheap, appo, ROWS, small, light, call),
        Case("1 kHz emulator, frames of 7 kB, weights of 6.8 MB", emulator, GPU_TRAIN_US, ROWS, frames, heavy, call),
        Case("2 ms environment, SAC, an update for 32 rows", slow, sac, ROWS, small, light, call),
    ]


def rows_per_second(case: Case, num_workers: int, iterations: int = 60) -> float:
    """Returns the rate of a simulated run, without its first third."""
    generator = random.Random(0)
    mean = case.rows / case.rate

    def duration() -> float:
        return mean * generator.lognormvariate(-(SPREAD**2) / 2, SPREAD)

    hosts = math.ceil(num_workers / WORKERS_PER_HOST)
    ready: list[tuple[float, int]] = [(duration(), worker) for worker in range(num_workers)]  # time, worker
    heapq.heapify(ready)
    waiting = [0.0] * num_workers  # time at which the worker has filled its last slot; it waits for another one
    free = [SLOTS - 1] * num_workers
    now = marked = 0.0
    for iteration in range(iterations):
        if iteration == iterations // 3:
            marked = now
        taken = []
        for _ in range(num_workers):  # an iteration trains on so many segments
            finished, worker = heapq.heappop(ready)
            now = max(now, finished)
            taken.append(worker)
            if free[worker]:  # it goes on with its other slot
                free[worker] -= 1
                heapq.heappush(ready, (finished + duration(), worker))
            else:
                waiting[worker] = finished
        now += num_workers * case.segment_ms / 1e3 + num_workers * case.rows * case.train_us / 1e6
        now += (hosts * case.call_ms + case.weights_ms) / 1e3
        for worker in taken:
            if waiting[worker]:
                waiting[worker] = 0.0
                heapq.heappush(ready, (now + duration(), worker))
            else:
                free[worker] += 1
    return (iterations - iterations // 3) * num_workers * case.rows / (now - marked)


def table(chosen: Sequence[Case], counts: Sequence[int] = WORKERS) -> str:
    """Returns the simulated rates as a Markdown table."""
    lines = [tables.header(["case", "us a row", *(f"rows/s at {count}" for count in counts), "1 / (v t)"])]
    for case in chosen:
        rates = [rows_per_second(case, count) for count in counts]
        cells = [f"{rate:,.0f} ({rate / (count * case.rate):.0%})" for rate, count in zip(rates, counts)]
        lines.append(tables.line([case.name, f"{case.train_us:g}", *cells, f"{1e6 / (case.rate * case.train_us):.0f}"]))
    return "\n".join(lines)


def main() -> None:
    first = cases()[0]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in Case.__annotations__.items():
        if name != "name":
            parser.add_argument(f"--{name}", type=kind, default=getattr(first, name))
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    arguments = parser.parse_args()
    own = first._replace(**{name: getattr(arguments, name) for name in Case._fields[1:]})
    chosen = cases() if own == first else [own._replace(name="yours")]
    print(table(chosen, list(map(int, arguments.workers.split(",")))))


if __name__ == "__main__":
    main()
