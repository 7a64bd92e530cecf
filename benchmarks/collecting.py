"""Rows per second of collecting: with and without double buffering, and where steps take unequal times.

    python -m benchmarks.collecting                        # all tasks; rows of docs/results/collecting.csv
    python -m benchmarks.collecting --tasks=waiting,frames

In alfish nothing trains. The sides of a task have the same environments and the same network, and take turns of some
seconds, so that a change of the machine's speed affects all of them.

  waiting   CartPole, with steps that wait for 2 ms; 16 environments, one process each
  frames    frames of 84 x 84 bytes, with steps that wait for 2 ms, and PPO's network for Atari; 8 environments, one
            process each
  pong      Pong in EnvPool with the same network, 16 environments; needs the extra `envpool`
  unequal   CartPole, with steps that wait for a log-normal time, 2 ms on average, sigma 1; 16 environments. `sync`
            steps them together, one process each. The other sides have a worker for each: `lockstep` waits for 32 rows
            of each worker; `free` takes the first 16 segments of 32 rows, so that fast workers give more of them.
  splits    the environments of `waiting` in Sample Factory, 8 processes of two each. A process steps both and then
            waits for their actions (`1`), or steps one while the policy acts for the other (`2`). It also trains.
"""

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from alfish.algorithms.appo import APPO
from alfish.algorithms.ppo import PPO
from alfish.environments import make_environment
from alfish.networks import ActorCritic, Torso
from alfish.networks.layers import MLP
from alfish.transforms import FrameStack, Transforms
from alfish.unrollers import AsyncUnroller, DoubleBufferedUnroller, SyncUnroller, Unroller
from benchmarks import PROJECT, processes, tables
from benchmarks.delayed import slow, slow_frames, unequal

TABLE = PROJECT / "docs" / "results" / "collecting.csv"
FIELDS = ("task", "side", "turn", "env_steps", "seconds", "env_steps_per_second", "machine")
LENGTH = 32  # vector steps of an unroll
ATARI = functools.partial(
    PPO,
    network=functools.partial(
        ActorCritic, actor_torso=functools.partial(Torso, mlp=functools.partial(MLP, layers=())), shared_torso=True
    ),
)


def make(task: str, side: Any) -> Unroller:
    """Builds the unroller of a side."""
    tasks: dict[str, Any] = {
        "waiting": (functools.partial(slow, "CartPole-v1", 0.002), 16, PPO, []),
        "frames": (functools.partial(slow_frames, 0.002), 8, ATARI, [FrameStack]),
        "pong": ("Pong-v5", 16, ATARI, []),
        "unequal": (functools.partial(unequal, "CartPole-v1", 0.002), 16, PPO if side == "sync" else APPO, []),
    }
    env_id, num_envs, algorithm, transforms = tasks[task]
    uses_workers = side in ("lockstep", "free")
    vectorization = "envpool" if task == "pong" else "sync" if uses_workers else "async"
    factory = functools.partial(make_environment, env_id, vectorization=vectorization)
    environment = factory(num_envs=1 if uses_workers else num_envs, seed=0)
    own = Transforms(transforms, environment.observation_spec, environment.reward_spec)
    torch.manual_seed(0)
    network = algorithm(own.observation_spec, environment.action_spec, environment.reward_spec)
    unroller: Any
    if uses_workers:
        unroller = AsyncUnroller(environment, network, own, num_workers=num_envs, envs_per_worker=1, mode=side)
    elif side == "double":
        unroller = DoubleBufferedUnroller(environment, network, own)
    else:
        unroller = SyncUnroller(environment, network, own)
    unroller.bind(factory, LENGTH, 0)
    return unroller


def take_turn(unroller: Unroller, seconds: float) -> dict[str, float]:
    """Collects for some seconds."""
    unroller.unroll(LENGTH)  # in a pause, workers have filled all of their slots
    unroller.unroll(LENGTH)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        unroller.unroll(LENGTH)
        steps += unroller.num_steps
        unroller.publish()
    passed = time.perf_counter() - began
    return {"env_steps": steps, "seconds": round(passed, 3), "env_steps_per_second": round(steps / passed, 1)}


def take_split_turn(python: str, num_splits: str) -> dict[str, float]:
    """Runs Sample Factory."""
    command = processes.side(python, "sample-factory", "throughput", "waiting", 0, num_splits)
    found = processes.run_script(command, processes.with_threads(1))
    steps, seconds = found["env_steps"], found["seconds"]
    return {"env_steps": steps, "seconds": round(seconds, 3), "env_steps_per_second": round(steps / seconds, 1)}


TASKS = {
    "waiting": ("sync", "double"),
    "frames": ("sync", "double"),
    "pong": ("sync", "double"),
    "unequal": ("sync", "lockstep", "free"),
    "splits": ("1", "2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--table", type=Path, default=TABLE)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for task in given.tasks.split(","):
        rows: list[dict[str, Any]] = []
        first, *_ = TASKS[task]
        with contextlib.ExitStack() as stack:
            turns: dict[str, Callable[[], dict[str, float]]] = {}
            for side in TASKS[task]:
                if task == "splits":
                    turns[side] = functools.partial(take_split_turn, processes.peer_python("sample-factory"), side)
                else:
                    unroller = stack.enter_context(contextlib.closing(make(task, side)))
                    turns[side] = functools.partial(take_turn, unroller, given.seconds)
            for turn in range(given.turns):
                for side, take in turns.items():
                    row = take()
                    rows.append({"task": task, "side": side, "turn": turn, **row, "machine": processes.machine()})
        rates = {side: [row["env_steps_per_second"] for row in rows if row["side"] == side] for side in turns}
        for side, own in rates.items():
            ratios = [each / base for each, base in zip(own, rates[first])]
            spread = f"{statistics.median(ratios):.2f} of {first}, {min(ratios):.2f} to {max(ratios):.2f}"
            print(f"{task} {side}: {statistics.median(own):,.0f} steps/s, {spread}", flush=True)
        tables.replace_rows(given.table, rows, FIELDS, ("task", "side", "turn"))


if __name__ == "__main__":
    main()
