"""Measures what `benchmarks.cost_model` simulates with: times of the trainer's processor, and rates of one worker.

  python -m benchmarks.ray_costs       # on an idle machine, two minutes; writes docs/results/ray_costs.csv
  python -m benchmarks.ray_costs --show    # the rows as the table of docs/scale.md

Calls, replies and publications are those of Ray, in processor time of this process with all its threads. A segment of
256 rows is received in a reply of Ray, and joined with 15 others as `AsyncUnroller` does. `train_us` is the time of an
iteration beside collecting, in a run of the conf. The rate is that of one worker with one environment.
"""

import argparse
import contextlib
import functools
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from alfish import nest
from alfish.algorithms.appo import APPO
from alfish.configuration.runs import configured_run
from alfish.environments import make_environment
from alfish.processes.messages import Seconds, Segment
from alfish.transforms import Transforms
from alfish.unrollers import AsyncUnroller
from alfish.unrollers.ray.object_store import ReceivedSegments
from alfish.unrollers.workers.segments import records_in_columns, side_by_side
from alfish.unrollers.workers.slots import ActingPolicy, slot_of
from benchmarks import PROJECT, processes, tables
from benchmarks.delayed import slow, slow_frames
from benchmarks.ray_nodes import Nodes

TABLE = PROJECT / "docs" / "results" / "ray_costs.csv"
FIELDS = ("what", "value", "unit", "machine")
ROWS, SEGMENTS = 256, 16  # rows of a segment, segments of an iteration
WEIGHTS = (300_000, 6_800_000)  # bytes
BATCHES, CALLS = 9, 20
SECONDS = 8.0  # of a measurement of a rate
# Environments by name: small rows that cost nothing or wait for 2 ms, and frames at 1 kHz.
ENVIRONMENTS: dict[str, Callable[[], Any]] = {
    "CartPole": functools.partial(gymnasium.make, "CartPole-v1"),
    "CartPole, 2 ms a step": functools.partial(slow, "CartPole-v1", 0.002),
    "frames of 7 kB, 1 ms a step": functools.partial(slow_frames, 0.001),
}
# Confs by name, with bindings: of about 2,000 rows an iteration, and an update for 32 rows.
BATCH_OF_ROWS = ["make_environment.num_envs = 16", "Trainer.unroll_length = 128"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "APPO, one epoch in minibatches of 128": (
        "appo_cartpole.gin",
        [*BATCH_OF_ROWS, "EpochBatches.num_epochs = 1", "EpochBatches.minibatch_size = 128"],
    ),
    "SAC, an update for 32 rows": (
        "sac_pendulum.gin",
        [*BATCH_OF_ROWS, "ReplayBatches.updates_per_env_step = 0.03125"],
    ),
}


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


def costs_of_ray() -> Iterator[tuple[str, float, str]]:
    """Yields name, value and unit of each measurement on a cluster of this machine."""
    nodes = Nodes((1,))
    try:
        import ray

        ray.init(nodes.address, log_to_driver=False, logging_level=logging.WARNING)
        actor: Any = ray.remote(Worker)
        worker = actor.options(num_cpus=1).remote()

        def poll(num_bytes: int) -> float:
            return milliseconds(lambda: ray.get(worker.poll.remote(num_bytes)))

        call = poll(0)
        yield "a call and its reply", call, "ms"
        for name in ("CartPole", "frames of 7 kB, 1 ms a step"):
            num_words, joining = joined(ENVIRONMENTS[name])
            received = max(poll(8 * num_words) - call, 0.0)
            yield f"a segment, {name.partition(',')[0]}", received + joining, "ms"
        for size in WEIGHTS:
            weights = np.zeros(size, np.uint8)
            yield f"a publication of {size:,} bytes", milliseconds(functools.partial(ray.put, weights)), "ms"
    finally:
        nodes.close()


def joined(make: Callable[[], Any]) -> tuple[int, float]:
    """Returns the length of a segment in words, and the milliseconds in which one of `SEGMENTS` is joined."""
    environment = make_environment(make)
    algorithm = APPO(environment.observation_spec, environment.action_spec, environment.reward_spec)
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    forms, structure = slot_of([ActingPolicy("", environment, algorithm, transforms, 1)], ROWS)
    environment.close()
    received = ReceivedSegments(forms, structure)
    words = np.zeros((SEGMENTS, received.layout.num_words), np.int64)
    segments = [Segment(i, i, 0, 0, [ROWS + 1], [[]], Seconds(0, 0, 0, 0)) for i in range(SEGMENTS)]

    def join() -> None:
        for segment in segments:
            received.add(segment, words[segment.slot])
        experiences, records = zip(*[own for segment in segments for own in received.read(segment)])
        records_in_columns([[each] for each in records])
        nest.arrays(side_by_side(list(experiences)))

    return received.layout.num_words, milliseconds(join) / SEGMENTS


def train_us(conf: str, bindings: list[str]) -> float:
    """Returns the microseconds that a run takes for each row, beside collecting, in its second half."""
    budget = 60_000
    length = f"Trainer.num_env_steps = {budget}", f"Trainer.summary_period = {budget // 2}"
    plain = "Learner.compile = False", "Trainer.listeners = []", "Trainer.device = 'cpu'"
    with tempfile.TemporaryDirectory() as directory:
        files = [conf], [*bindings, *length, *plain]
        with configured_run(Path(directory), *files) as trainer, contextlib.closing(trainer):
            scalars: dict[str, float] = {}
            for report in trainer.iterate():
                scalars |= report.scalars
            return 1e3 * scalars["time/train_ms"] * trainer.clock.iterations / trainer.clock.env_steps


def worker_rate(make: Callable[[], Any]) -> float:
    """Returns the rows per second of one worker, which acts with a policy of APPO."""
    factory = functools.partial(make_environment, make, num_envs=1)
    environment = factory(seed=0)
    algorithm = APPO(environment.observation_spec, environment.action_spec, environment.reward_spec)
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    unroller = AsyncUnroller(environment, algorithm, transforms, 1, slots=3, unroll_length=ROWS)
    unroller.bind(factory, ROWS, 0)
    try:
        unroller.unroll()  # the worker has started
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            unroller.unroll()
            count += ROWS
        return count / (time.perf_counter() - began)
    finally:
        unroller.close()


def measured() -> Iterator[tuple[str, float, str]]:
    """Yields name, value and unit of each measurement."""
    yield from costs_of_ray()
    for name, run in RUNS.items():
        yield f"training on a row, {name}", train_us(*run), "us"
    for name, make in ENVIRONMENTS.items():
        yield f"one worker, {name}", worker_rate(make), "rows/s"


def table(path: Path = TABLE) -> str:
    """Returns the Markdown table of the rows in a file."""
    lines = [tables.line([row["what"], f"{row['value']} {row['unit']}"]) for row in tables.read_rows(path)]
    return "\n".join([tables.header(["of one processor", "measured"]), *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="measure nothing")
    if not parser.parse_args().show:
        rows = [
            {"what": what, "value": f"{value:.3g}" if value < 1000 else f"{value:.0f}", "unit": unit}
            for what, value, unit in measured()
        ]
        tables.write_rows(TABLE, [row | {"machine": processes.machine()} for row in rows], FIELDS)
    print(table())


if __name__ == "__main__":
    main()
