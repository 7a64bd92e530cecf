"""Steps per second of whole iterations of PPO on CartPole, with environments as numpy, as tensors, and compiled.

  python -m benchmarks.iteration                                    all sizes: some minutes
  python -m benchmarks.iteration --num_envs=1024 --layers=64        some sizes
  python -m benchmarks.iteration --table                            only the table, from existing rows

An iteration is the trainer's own: an unroll, metrics, advantages, one epoch of four minibatches, and schedules. The
variants take turns in one process with one thread, after all graphs are compiled:

- numpy: gymnasium's CartPole, joint steps in numpy, a compiled update;
- tensors: `alfish/CartPole-v1` with `SyncUnroller`, a compiled update;
- compiled: `alfish/CartPole-v1` with `CompiledUnroller`, a compiled preparation of the unroll and a compiled update.

Steps are rows that train. Processor time counts beside wall time, because other programs may use the machine.
Writes `docs/results/iteration.csv`, a row for each round, and prints the table of docs/results.md.
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch

from alfish.algorithms.ppo import PPO
from alfish.environments import make_environment
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.networks import MLP, ActorCritic, Torso
from alfish.training.trainer import Trainer
from alfish.unrollers import CompiledUnroller, SyncUnroller
from benchmarks import PROJECT, processes, tables

CSV = PROJECT / "docs" / "results" / "iteration.csv"
KEY = ("variant", "num_envs", "length", "layers", "round")
FIELDS = (*KEY, "steps_per_second", "steps_per_cpu_second", "machine")
VARIANTS = {
    "numpy": ("CartPole-v1", SyncUnroller),
    "tensors": ("alfish/CartPole-v1", SyncUnroller),
    "compiled": ("alfish/CartPole-v1", CompiledUnroller),
}
LENGTH = 16  # vector steps of an unroll
ROUNDS, SECONDS = 7, 2.0  # number of rounds, and seconds of each variant in a round
WARM_UP = 12  # iterations in which graphs are made and compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_envs", default="256,1024,4096")
    parser.add_argument("--layers", default="32,64", help="sizes of the two layers of policy and value")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        for num_envs in map(int, arguments.num_envs.split(",")):
            for layers in map(int, arguments.layers.split(",")):
                measure(num_envs, layers)
    print(table(tables.read_rows(CSV)))


def measure(num_envs: int, layers: int) -> None:
    """Measures all variants in turns, and writes their rows."""
    with tempfile.TemporaryDirectory() as root_dir:
        trainers = {variant: _trainer(f"{root_dir}/{variant}", variant, num_envs, layers) for variant in VARIANTS}
        for trainer in trainers.values():
            trainer.start()
        loops = {variant: trainer.iterate() for variant, trainer in trainers.items()}
        for loop in loops.values():
            for _ in range(WARM_UP):
                next(loop)
        rows = []
        for number in range(ROUNDS):
            for variant, loop in loops.items():
                began, cpu, before = time.perf_counter(), time.process_time(), trainers[variant].clock.env_steps
                while time.perf_counter() - began < SECONDS:
                    next(loop)
                steps = trainers[variant].clock.env_steps - before
                seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
                rows.append(
                    {
                        **dict(zip(KEY, (variant, num_envs, LENGTH, layers, number))),
                        "steps_per_second": round(steps / seconds),
                        "steps_per_cpu_second": round(steps / cpu),
                        "machine": processes.machine(),
                    }
                )
        for trainer in trainers.values():
            trainer.close()
    tables.replace_rows(CSV, rows, FIELDS, KEY)


def _trainer(root_dir: str, variant: str, num_envs: int, layers: int) -> Trainer:
    env_id, unroller = VARIANTS[variant]
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(layers, layers)))
    return Trainer(
        root_dir,
        algorithm=functools.partial(
            PPO, network=functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso), gamma=0.98
        ),
        environment=functools.partial(make_environment, env_id, num_envs=num_envs),
        batches=functools.partial(EpochBatches, num_epochs=1, minibatch_size=num_envs * LENGTH // 4),
        unroller=unroller,
        learner=functools.partial(Learner, compile=True, learning_rate=1e-3, max_grad_norm=0.5),
        listeners=[],
        unroll_length=LENGTH,
        num_env_steps=10**12,
        summary_period=10**6,
        num_threads=1,
    )


def table(rows: Sequence[dict[str, str]]) -> str:
    """Returns a Markdown table: medians of steps per second, and in brackets of steps per second of the processor."""
    lines = [tables.header(["environments", "layers", *VARIANTS, "compiled / numpy"])]
    for num_envs, layers in sorted({(int(row["num_envs"]), int(row["layers"])) for row in rows}):
        own = [row for row in rows if (row["num_envs"], row["layers"]) == (str(num_envs), str(layers))]
        medians = {
            (variant, field): statistics.median(float(row[field]) for row in own if row["variant"] == variant)
            for variant in VARIANTS
            for field in ("steps_per_second", "steps_per_cpu_second")
        }
        by_round = {(row["variant"], row["round"]): float(row["steps_per_second"]) for row in own}
        ratios = [by_round["compiled", str(k)] / by_round["numpy", str(k)] for k in range(ROUNDS)]
        cells = [
            f"{medians[variant, 'steps_per_second']:,.0f} ({medians[variant, 'steps_per_cpu_second']:,.0f})"
            for variant in VARIANTS
        ]
        ratio = f"{statistics.median(ratios):.1f} [{min(ratios):.1f}, {max(ratios):.1f}]"
        lines.append(tables.line([f"{num_envs:,}", f"2 x {layers}", *cells, ratio]))
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
