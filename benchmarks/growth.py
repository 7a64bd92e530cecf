"""Growth of alfish's cost with the number of environments, batch size, width of networks, and rows in replay.

  python -m benchmarks.growth            about ten minutes
  python -m benchmarks.growth --quick    fewer values of each, under two minutes
  python -m benchmarks.growth --parts=replay

- environments: microseconds per environment step of acting and stepping, without updates (`SyncUnroller`, PPO's 2x64
  policy through numpy, CartPole), with single environments and with gymnasium's vector class.
- batch: microseconds per update (`Learner`), plain and compiled, of PPO with 2x64 and SAC with 2x256, 17 observations
  and 6 actions, always on the same batch.
- width: the same at 256 rows, over the width of both layers of all networks.
- replay: microseconds to sample 256 transitions of 17 observations, over the number of rows in a full ring.

On one thread. Every point is the median of --repeats measurements, each the median of some calls; so it leaves out that
a compiled update, or a policy through numpy, is compared with the plain one now and then. Writes
`benchmarks/results/growth.csv` (where parts that were not run keep their rows) and `growth.svg` after each part.
"""

import argparse
import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, and what it brings along, count the cores

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from gymnasium import spaces

from alfish import nest, specs
from alfish.algorithms.ppo import PPO
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.algorithms.sac import SAC
from alfish.data import Batch, Experience, StepType, TimeStep, trainable
from alfish.environments import make_environment
from alfish.learner.batches import EpochBatches, Minibatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, ActorCritic, CriticEnsemble, Torso
from alfish.replay import RingBuffer
from alfish.transforms import Transforms
from alfish.unrollers import SyncUnroller
from benchmarks import RESULTS, processes, tables
from benchmarks.timing import seconds_a_call

OBSERVATION, ACTION = spaces.Box(-1, 1, (17,)), spaces.Box(-1, 1, (6,))
SECONDS = 0.3  # that a measurement takes
FIELDS = ("part", "series", "x", "microseconds", "smallest", "largest", "repeats", "machine")
Point = tuple[str, int, list[float]]  # a series, x, microseconds of each measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for part in arguments.parts.split(","):
        measure, all_xs, few_xs, _ = PARTS[part]
        rows = []
        for series, x, values in measure(few_xs if arguments.quick else all_xs, arguments.repeats):
            numbers = (statistics.median(values), min(values), max(values), len(values))
            rows.append(dict(zip(FIELDS, (part, series, x, *numbers, processes.machine()))))
            print(f"{part} {x:,} {series}: {numbers[0]:,.2f} us", flush=True)
        draw(publish(rows))


def publish(rows: list[dict]) -> list[dict[str, str]]:
    """Replaces the rows of the same parts in the file; returns all rows of the file."""
    order = list(PARTS)
    return tables.replace_rows(RESULTS / "growth.csv", rows, FIELDS, ["part"], lambda row: order.index(row["part"]))


# What is measured.


def environments(counts: list[int], repeats: int) -> Iterator[Point]:
    """Yields microseconds of an environment step, by the number of environments."""
    for count in counts:
        for vectorization in ("sync", "vector_entry_point"):
            environment = make_environment(env_id="CartPole-v1", num_envs=count, vectorization=vectorization)
            algorithm = PPO(environment.observation_spec, environment.action_spec, environment.reward_spec)
            transforms = Transforms([], environment.observation_spec, environment.reward_spec)
            unroller = SyncUnroller(environment, algorithm, transforms, numpy_policy=0)
            length = max(8, min(256, 16_384 // count))
            unroll = functools.partial(unroller.unroll, length)
            unroller.unroll(70)  # past the steps at which numpy's results are compared with torch's
            yield vectorization, count, [each / (length * count) for each in measured(unroll, repeats)]
            unroller.close()


def batch_sizes(sizes: list[int], repeats: int) -> Iterator[Point]:
    """Yields microseconds of an update, by the rows of a batch."""
    for size in sizes:
        yield from updates(size, 64, 256, size, repeats)


def widths(sizes: list[int], repeats: int) -> Iterator[Point]:
    """Yields microseconds of an update, by the width of the networks' layers."""
    for width in sizes:
        yield from updates(256, width, width, width, repeats)


def updates(batch_size: int, ppo_width: int, sac_width: int, x: int, repeats: int) -> Iterator[Point]:
    """Yields microseconds of an update of PPO and SAC, plain and compiled, as points at `x`."""
    for name, make in (("PPO", functools.partial(ppo, ppo_width)), ("SAC", functools.partial(sac, sac_width))):
        for kind in ("plain", "compiled") if shutil.which("g++") else ("plain",):
            torch.manual_seed(0)
            algorithm, chunk = make(batch_size)
            learner = Learner(algorithm, compile=kind == "compiled")
            for _ in range(17 if kind == "compiled" else 1):  # compiles, and compares nearly every one with the plain
                learner.train([chunk])
            update = functools.partial(learner.train, [chunk], summarize=False)
            yield f"{name}, {kind}", x, measured(update, repeats)
            assert learner.is_plain == (kind == "plain"), f"{name} was not compiled"


def replay(capacities: list[int], repeats: int) -> Iterator[Point]:
    """Yields microseconds of a sample, by the rows in replay."""
    for capacity in capacities:
        ring = RingBuffer(capacity, 1)
        block = random_rows(10_000, 1)
        for _ in range(capacity // len(block.action)):
            ring.push(block)
        yield "sample 256", capacity, measured(functools.partial(ring.sample, 256), repeats)


PARTS: dict[str, tuple[Callable[[list[int], int], Iterator[Point]], list[int], list[int], tuple[str, str]]] = {
    "environments": (
        environments,
        [1, 4, 16, 64, 256, 1024, 4096],
        [1, 16, 256],
        ("environments", "us an environment step"),
    ),
    "batch": (batch_sizes, [64, 256, 1024, 4096, 16_384], [64, 1024], ("rows a batch", "us an update")),
    "width": (widths, [64, 128, 256, 512, 1024, 2048], [64], ("width of two layers", "us an update of 256 rows")),
    "replay": (
        replay,
        [10_000, 100_000, 1_000_000, 10_000_000],
        [10_000, 100_000],
        ("rows in replay", "us a sample of 256"),
    ),
}


def measured(function: Callable[[], object], repeats: int) -> list[float]:
    """Returns `repeats` medians of microseconds a call, each over `SECONDS` of calls, at least one."""

    def call(_: int) -> None:
        function()

    seconds_a_call(call, 2)  # that do not count
    values = []
    for _ in range(repeats):
        calls: list[float] = []
        end = time.perf_counter() + SECONDS
        while not calls or time.perf_counter() < end:
            calls.append(seconds_a_call(call))
        values.append(1e6 * statistics.median(calls))
    return values


# What it is measured on.


def random_rows(length: int, num_envs: int) -> Experience:
    """`[T, B]` rows within an episode."""
    shape = (length, num_envs)
    action = torch.rand(*shape, *ACTION.shape) * 1.8 - 0.9
    kind = torch.full(shape, StepType.MID, dtype=torch.int32)
    env_id = torch.arange(num_envs, dtype=torch.int32).expand(shape)
    observation = torch.randn(*shape, *OBSERVATION.shape)
    step = TimeStep(kind, torch.randn(shape), torch.ones(shape), observation, torch.zeros_like(action), env_id)
    return Experience(step, action, None, None)


def algorithm_of(factory: Callable[..., RLAlgorithm]) -> RLAlgorithm:
    return factory(specs.observation_spec(OBSERVATION), specs.action_spec(ACTION), specs.reward_spec())


def ppo(width: int, batch_size: int) -> tuple[RLAlgorithm, Minibatches]:
    """Returns an update of PPO on one epoch's batch, whose rows its own policy produced."""
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(width, width)))
    network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)
    algorithm = algorithm_of(functools.partial(PPO, network=network))
    rows = random_rows(2, batch_size)
    with torch.no_grad():
        acted = [algorithm.rollout_step(nest.at(rows.time_step, t), None) for t in range(2)]
    action, info = nest.stack([(step.output, step.info) for step in acted])
    source = EpochBatches(num_epochs=1)
    source.bind(algorithm, Transforms([], algorithm.observation_spec, algorithm.reward_spec), 1, batch_size)
    source.add(Experience(rows.time_step, action, info, None))
    return algorithm, next(source.chunks(0))._replace(index=None)


def sac(width: int, batch_size: int) -> tuple[RLAlgorithm, Minibatches]:
    """Returns an update of SAC on a batch of windows of two rows."""
    mlp = functools.partial(MLP, layers=(width, width), activation="relu")
    critic = functools.partial(CriticEnsemble, layers=(width, width))
    algorithm = algorithm_of(functools.partial(SAC, actor_mlp=mlp, critic=critic))
    windows = random_rows(2, batch_size)
    return algorithm, Minibatches(Batch(windows, trainable(windows.time_step.step_type)), None)


# The picture.


def draw(rows: list[dict[str, str]]) -> None:
    """Draws all rows of the file, one plot for each part."""
    matplotlib.rcParams |= {
        "svg.hashsalt": "alfish",
        "svg.fonttype": "none",
    }  # equal figures, equal files; text as text
    figure, axes = plt.subplots(1, len(PARTS), figsize=(15, 3.4), layout="constrained")
    for axis, (part, (*_, (x_label, y_label))) in zip(axes, PARTS.items()):
        for series in dict.fromkeys(row["series"] for row in rows if row["part"] == part):
            own = [row for row in rows if (row["part"], row["series"]) == (part, series)]
            xs, ys = ([float(row[name]) for row in own] for name in ("x", "microseconds"))
            axis.plot(xs, ys, marker="o", markersize=3, linewidth=1.5, label=series)
        axis.set_xscale("log"), axis.set_yscale("log")
        axis.set_xlabel(x_label), axis.set_ylabel(y_label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        if axis.lines:
            axis.legend(fontsize=8, frameon=False)
    figure.savefig(RESULTS / "growth.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
