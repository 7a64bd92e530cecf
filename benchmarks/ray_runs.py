"""Runs on a Ray cluster of this machine, with or without `Chaos`."""

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from alfish import nest
from alfish.algorithms.appo import APPO
from alfish.algorithms.rl_algorithm import RLAlgorithm
from alfish.configuration.runs import configured_run
from alfish.data import AlgStep, Experience, LossInfo, StepType, TimeStep
from alfish.environments import make_environment
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.networks import ActorCritic
from alfish.training.trainer import Trainer
from alfish.transforms import Transforms
from alfish.unrollers import AsyncUnroller, Unroller, Workers
from alfish.unrollers.ray import RayWorkers
from benchmarks.delayed import Stamped, slow
from benchmarks.ray_nodes import Chaos, Nodes

STEP_SECONDS = 0.002
ON_RAY = functools.partial(
    RayWorkers,
    per_host=2,
    cpus_per_worker=0.25,  # they sleep
    max_deaths=100_000,
    workers=functools.partial(Workers, max_deaths=100_000, close_timeout=2.0),
)


class Still(RLAlgorithm):
    """Takes action 0 always."""

    on_policy = False

    def rollout_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        return AlgStep(time_step.step_type.long() * 0, state)

    def train_step(self, experience: Experience, state: Any) -> AlgStep:
        return AlgStep()

    def calc_loss(self, experience: Experience, info: Any) -> LossInfo:
        return LossInfo(experience.time_step.reward * 0)


class StampedRows:
    """Checks that rows of `Stamped` are complete: none torn, lost or doubled.

    Rows of one process of a worker have one stamp and are contiguous, also from episode to episode. A column changes to
    another stamp only at the first row of an episode, and never back.

    Args:
      num_columns: number of environments.

    Attributes:
      count: number of rows.
    """

    def __init__(self, num_columns: int):
        self.count = 0
        self._newest: list[tuple[int, float, np.ndarray] | None] = [None] * num_columns
        self._stamps: list[set[float]] = [set() for _ in range(num_columns)]

    def add(self, time_step: TimeStep) -> list[int]:
        """Checks rows `[T, B]`, and returns the columns in which a new process has begun.

        Raises:
          AssertionError: a row is wrong, or does not follow from the one before.
        """
        new = []
        for column in range(len(self._newest)):
            for t in np.flatnonzero(np.asarray(time_step.step_type[:, column]) != StepType.PAD):
                row = int(time_step.step_type[t, column]), float(time_step.reward[t, column])
                stamp, episode, step = (float(x) for x in time_step.observation[t, column])
                if stamp not in self._stamps[column]:
                    assert row[0] == StepType.FIRST and (episode, step) == (0, 0), "a new process began in mid-episode"
                    self._stamps[column].add(stamp)
                    new.append(column)
                else:
                    self._check(self._newest[column], (*row, np.array([stamp, episode, step])))
                self._newest[column] = (*row, np.array([stamp, episode, step]))
                self.count += 1
        return new

    @staticmethod
    def _check(before: tuple[int, float, np.ndarray] | None, row: tuple[int, float, np.ndarray]) -> None:
        assert before is not None
        (kind, _, there), (next_kind, reward, here) = before, row
        assert here[0] == there[0], "rows of a process came after those of its successor"
        if kind == StepType.LAST:
            assert next_kind == StepType.FIRST and (here[1:] == (there[1] + 1, 0)).all(), f"{there} and then {here}"
        else:
            assert next_kind != StepType.FIRST and (here[1:] == (there[1], there[2] + 1)).all(), f"{there}, then {here}"
            assert reward == here[2], f"reward {reward} of step {here[2]}"


def soak(
    nodes: Nodes,
    seconds: float,
    num_workers: int = 6,
    settle: float = 0.0,
    enough: Callable[[Chaos], bool] = lambda breaking: False,
    log: Callable[[str], None] = print,
    spare_hosts: int = 0,
    **chaos: Any,
) -> tuple[int, Chaos]:
    """Collects rows while hosts break, and checks each.

    Args:
      nodes: the cluster.
      seconds: in which something is broken.
      num_workers: workers, each with two environments.
      settle: seconds afterwards.
      enough: ends the run earlier.
      log: receives the lines of the run.
      spare_hosts: of `RayWorkers`.
      chaos: arguments of `Chaos`.

    Returns:
      The number of rows, and what broke.
    """
    make = functools.partial(
        make_environment, functools.partial(Stamped, (30, 50, 10, 80), seconds=STEP_SECONDS), num_envs=2
    )
    environment = make(seed=0)
    specs = environment.observation_spec, environment.action_spec, environment.reward_spec
    transforms = Transforms((), environment.observation_spec, environment.reward_spec)
    workers = functools.partial(ON_RAY, host_timeout=chaos.pop("host_timeout", 30.0), spare_hosts=spare_hosts)
    unroller = AsyncUnroller(
        environment, Still(*specs), transforms, num_workers, unroll_length=16, slots=3, workers=workers
    )
    unroller.bind(make, 16, 0)
    unroller.log = log
    rows, num_seen = StampedRows(2 * num_workers), 0
    breaking = None
    try:
        while breaking is None or (time.monotonic() < breaking.until + settle and not enough(breaking)):
            new = rows.add(nest.tensors(unroller.unroll()).time_step)
            unroller.publish()
            num_seen += len(new)
            if breaking is None and num_seen == 2 * num_workers:
                breaking, new = Chaos(nodes, transport(unroller), seconds, **chaos), []
            if breaking is not None:
                for column in new:
                    breaking.saw_new_process(column // 2)
                breaking()
    finally:
        unroller.close()
        if breaking is not None:
            breaking.end()
    assert breaking is not None
    return rows.count, breaking


def transport(unroller: Unroller) -> RayWorkers:
    """Returns the transport of an unroller on Ray."""
    assert isinstance(unroller, AsyncUnroller) and isinstance(unroller._workers, RayWorkers)
    return unroller._workers


def trained(
    directory: Path, environment: Callable[..., Any], num_workers: int, per_host: int, **settings: Any
) -> Trainer:
    """Returns a trainer of APPO by the recipe of appo_cartpole.gin, whose workers are on Ray."""
    workers = functools.partial(ON_RAY, per_host=per_host, **settings)
    trainer = Trainer(
        directory,
        algorithm=functools.partial(APPO, gamma=0.98, lambda_=0.8, network=ActorCritic),
        environment=environment,
        unroller=functools.partial(AsyncUnroller, num_workers=num_workers, slots=3, workers=workers),
        batches=functools.partial(EpochBatches, num_epochs=1, minibatch_size=128),
        learner=functools.partial(Learner, learning_rate=1e-3, max_grad_norm=0.5, compile=False),
        unroll_length=128,
        wall_seconds=10_000,
        summary_period=10**9,  # a summary would take the unroller's statistics away
        listeners=[],
    )
    trainer.unroller.log = lambda text: None
    return trainer


def rate(
    nodes: Nodes, num_workers: int, seconds: float, kill_period: float, spare_hosts: int = 0
) -> tuple[float, dict[str, float]]:
    """Returns env steps per second of a training run, and what its unroller says of waits."""
    environment = functools.partial(make_environment, functools.partial(slow, "CartPole-v1", STEP_SECONDS), num_envs=1)
    with tempfile.TemporaryDirectory() as directory:
        per_host = max(1, num_workers // 4)
        trainer = trained(Path(directory), environment, num_workers, per_host, spare_hosts=spare_hosts)
        workers, breaking = transport(trainer.unroller), None
        try:
            for _ in trainer.iterate():
                now = time.monotonic()
                if breaking is None and all(worker.started for worker in workers.all):
                    trainer.unroller.stats()
                    breaking = Chaos(nodes, workers, seconds if kill_period else 0.0, ("actor",), (kill_period,) * 2)
                    began, before, end = now, trainer.clock.env_steps, now + seconds
                if breaking is not None:
                    breaking()
                    if now > end:
                        break
            return (trainer.clock.env_steps - before) / (now - began), trainer.unroller.stats()
        finally:
            trainer.close()


def score(nodes: Nodes, seconds: float) -> tuple[float, int, Chaos]:
    """Trains appo_cartpole.gin with ray.gin under kills, for about so many seconds.

    Returns:
      The mean return of 20 episodes, the env steps of the training, and what broke.
    """
    bindings = [
        *("AsyncUnroller.num_workers = 4", "AsyncUnroller.segments_per_unroll = 1", "AsyncUnroller.slots = 3"),
        *("RayWorkers.per_host = 2", "RayWorkers.cpus_per_worker = 0.25", "RayWorkers.max_deaths = 100_000"),
        *("Workers.max_deaths = 100_000", "Workers.close_timeout = 2.0", "Learner.compile = False"),
        f"AsyncUnroller.worker_step_interval = {seconds * 4 * 8 / 100_000}",  # else it lasts some seconds
        "Trainer.listeners = []",
    ]
    files = ["appo_cartpole.gin", "ray.gin"]
    with (
        tempfile.TemporaryDirectory() as directory,
        configured_run(Path(directory), files, bindings, "stop") as trainer,
        contextlib.closing(trainer),
        contextlib.closing(trainer.evaluator(20)) as evaluator,
    ):
        trainer.unroller.log = lambda text: None
        breaking = None
        for _ in trainer.iterate():
            breaking = breaking or Chaos(nodes, transport(trainer.unroller), seconds)
            breaking()
        assert breaking is not None
        breaking.end()
        return evaluator.evaluate(20, seed=10_000).mean, trainer.clock.env_steps, breaking
