"""Rows per second of each part of an iteration with thousands of environments of a simulator.

    python -m benchmarks.simulators                       # 1,024, 4,096 and 16,384 environments on the CPU
    python -m benchmarks.simulators --device=cuda         # on a GPU

The simulator draws random observations (48 numbers) and ends one episode in 100 steps, so that its own steps cost
little. PPO and SAC have two layers of 256. Parts:

  unroll         24 vector steps of PPO's policy
  in_line        the LAST rows of this unroll at their places in the stream
  update         four updates of PPO, each on a quarter of this unroll, with their preparation
  push, aligned  one vector step into a `RingBuffer` (after `in_line`), and into an `AlignedRingBuffer`
  draw, aligned  4,096 windows of two rows from each of them

Rings hold 100 rows of each environment. A figure is the median of --repeats measurements, each of 5 calls; the parts
take turns. Rows go to docs/results/simulators.csv.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces

from alfish.algorithms.ppo import PPO
from alfish.algorithms.sac import SAC
from alfish.data import in_line
from alfish.environments import Simulator, SimulatorStep, make_environment
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.nest import Nest
from alfish.networks import MLP, ActorCritic, Torso
from alfish.replay import AlignedRingBuffer, RingBuffer
from alfish.transforms import Transforms
from alfish.unrollers import SyncUnroller
from benchmarks import PROJECT, processes, tables
from benchmarks.timing import seconds_a_call

TABLE = PROJECT / "docs" / "results" / "simulators.csv"
FIELDS = ("device", "environments", "part", "rows", "milliseconds", "rows_per_second", "machine")
LENGTH, NUM_WINDOWS, CALLS = 24, 4096, 5


class Noise(Simulator):
    """Draws random observations, and ends an episode in one of 100 steps.

    Args:
      num_envs: number of environments, B.
      device: device of all tensors.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (48,), np.float32)
    action_space = spaces.Box(-1, 1, (12,), np.float32)

    def __init__(self, num_envs: int, device: str):
        self.num_envs, self.device = num_envs, torch.device(device)

    def reset(self, seed: int | None) -> Nest:
        return self._draw()

    def step(self, action: Nest) -> SimulatorStep:
        ended = torch.rand(self.num_envs, device=self.device) < 0.01
        final, first = self._draw(), self._draw()
        observation = torch.where(ended[:, None], first, final)
        return SimulatorStep(observation, action[:, 0], torch.zeros_like(ended), ended, final)

    def _draw(self) -> torch.Tensor:
        return torch.randn(self.num_envs, 48, device=self.device)


def parts(num_envs: int, device: str) -> dict[str, tuple[int, Callable[[int], object]]]:
    """Returns the rows and the function of each part."""
    environment = make_environment(Noise, num_envs, device=device)
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(256, 256)))
    network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)
    specs = transforms.observation_spec, environment.action_spec, environment.reward_spec
    ppo, sac = (made.to(device) for made in (PPO(*specs, network=network), SAC(*specs)))
    unroller = SyncUnroller(environment, ppo, transforms)
    experience = unroller.unroll(LENGTH)
    batches = EpochBatches(num_epochs=1, minibatch_size=num_envs * LENGTH // 4)
    batches.bind(ppo, transforms, LENGTH, num_envs)
    learner = Learner(ppo)
    steps = SyncUnroller(environment, sac, transforms)
    rings = [kind(100 * num_envs, num_envs, device) for kind in (RingBuffer, AlignedRingBuffer)]
    rows = steps.unroll(1)._replace(info=None)

    def update(_: int) -> None:
        batches.add(experience)
        learner.train(batches.chunks(LENGTH * num_envs), summarize=False)

    def push(number: int) -> None:
        rings[0].push(in_line(rows).experience)

    push(0)
    rings[1].push(rows)
    for _ in range(99):
        more = steps.unroll(1)._replace(info=None)
        rings[0].push(in_line(more).experience)
        rings[1].push(more)
    return {
        "unroll": (LENGTH * num_envs, lambda _: unroller.unroll(LENGTH)),
        "in_line": (LENGTH * num_envs, lambda _: in_line(experience)),
        "update": (LENGTH * num_envs, update),
        "push": (num_envs, push),
        "push, aligned": (num_envs, lambda _: rings[1].push(rows)),
        "draw": (NUM_WINDOWS, lambda _: rings[0].windows(rings[0].draw(NUM_WINDOWS), 2)),
        "draw, aligned": (NUM_WINDOWS, lambda _: rings[1].windows(rings[1].draw(NUM_WINDOWS), 2)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", default="1024,4096,16384")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--table", type=Path, default=TABLE)
    given = parser.parse_args()
    torch.set_num_threads(1)
    wait = torch.cuda.synchronize if given.device != "cpu" else lambda: None
    for num_envs in map(int, given.environments.split(",")):
        own = parts(num_envs, given.device)
        seconds: dict[str, list[float]] = {name: [] for name in own}
        for _ in range(given.repeats):
            for name, (_, function) in own.items():

                def calls(_: int, function: Callable[[int], object] = function) -> None:
                    for number in range(CALLS):
                        function(number)
                    wait()

                seconds[name].append(seconds_a_call(calls) / CALLS)
        rows = []
        for name, (num_rows, _) in own.items():
            median = statistics.median(seconds[name])
            row = {"device": given.device, "environments": num_envs, "part": name, "rows": num_rows}
            row |= {"milliseconds": round(1e3 * median, 4), "rows_per_second": round(num_rows / median)}
            rows.append(row | {"machine": processes.machine()})
            print(f"{num_envs} {name}: {1e3 * median:.3f} ms, {num_rows / median:,.0f} rows/s", flush=True)
        tables.replace_rows(given.table, rows, FIELDS, ("device", "environments", "part"))


if __name__ == "__main__":
    main()
