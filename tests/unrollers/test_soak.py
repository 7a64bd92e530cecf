"""Workers are killed at random for a minute (ALFISH_SOAK_SECONDS; ten in `make soak`); no row is torn or doubled."""

import functools
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from scripted import check_stamps
from toys import Stamped
from worker_parts import SeeingOffPolicy

from alfish.algorithms.appo import APPO
from alfish.data import StepType
from alfish.environments import make_environment
from alfish.learner.batches import EpochBatches
from alfish.learner.learner import Learner
from alfish.networks import ActorCritic
from alfish.training.trainer import Trainer
from alfish.transforms import Transforms
from alfish.unrollers import AsyncUnroller, Workers

SECONDS = float(os.environ.get("ALFISH_SOAK_SECONDS", "60"))
WORKERS = functools.partial(Workers, max_deaths=100_000, close_timeout=2.0)


class Killer:
    """Kills a worker that has started, now and then, while there is time."""

    def __init__(self, workers, seconds):
        self._workers, self._random = workers, random.Random(0)
        self.until = time.monotonic() + seconds
        self._next = 0.0
        self.kills = 0

    def __call__(self):
        now = time.monotonic()
        running = [worker for worker in self._workers.all if worker.alive and worker.started]
        if now < self._next or now > self.until or not running:
            return
        os.kill(self._random.choice(running).process.pid, signal.SIGKILL)
        self.kills += 1
        self._next = now + self._random.uniform(0.5, 3.0)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
def test_every_row_is_right_while_workers_die(tmp_path):
    environment = functools.partial(make_environment, functools.partial(Stamped, (30, 50, 10, 80)), num_envs=3)
    here = environment(seed=0)
    algorithm = SeeingOffPolicy(here.observation_spec, here.action_spec, here.reward_spec)
    unroller = AsyncUnroller(
        here,
        algorithm,
        Transforms((), here.observation_spec, here.reward_spec),
        num_workers=2,
        unroll_length=16,
        slots=3,
        workers=WORKERS,
    )
    unroller.bind(environment, 16, 0)
    unroller.log = lambda text: None
    newest = [None] * 6
    num_rows, memory = 0, []
    try:
        killer = Killer(unroller._workers, SECONDS / 2)
        while time.monotonic() < killer.until or num_rows == 0:
            killer()
            step = unroller.unroll().time_step
            types, stamps, rewards = step.step_type.tolist(), step.observation.tolist(), step.reward.tolist()
            for column in range(6):
                rows = [newest[column]] if newest[column] else []
                for t in range(len(types)):
                    if types[t][column] != StepType.PAD:
                        rows.append((types[t][column], rewards[t][column], stamps[t][column]))
                check_stamps(rows, may_break=True)
                num_rows += len(rows) - (newest[column] is not None)
                newest[column] = rows[-1] if rows else None
            unroller.publish()
            memory.append(resident_bytes())
    finally:
        unroller.close()
    print(f"{killer.kills} kills, {num_rows} rows")
    assert killer.kills >= SECONDS / 20 and unroller.stats()["restarts"] >= killer.kills - 2
    assert memory[-1] - memory[len(memory) // 3] < 20e6


@pytest.mark.long
def test_the_score_is_the_same_while_workers_die(tmp_path):
    trainer = Trainer(
        tmp_path,
        algorithm=functools.partial(APPO, gamma=0.98, lambda_=0.8, network=ActorCritic),
        environment=functools.partial(make_environment, "CartPole-v1", num_envs=8),
        unroller=functools.partial(AsyncUnroller, num_workers=2, segments_per_unroll=1, slots=3, workers=WORKERS),
        batches=functools.partial(EpochBatches, num_epochs=10, minibatch_size=256),
        learner=functools.partial(Learner, learning_rate=1e-3, max_grad_norm=0.5, compile=False),
        unroll_length=32,
        wall_seconds=10_000,
        listeners=[],
    )
    trainer.log = trainer.unroller.log = lambda text: None
    evaluator = trainer.evaluator(20)
    try:
        killer = Killer(trainer.unroller._workers, SECONDS / 2)
        for _ in trainer.iterate():
            killer()
            if time.monotonic() > killer.until and trainer.clock.env_steps >= 60_000:
                break
        result = evaluator.evaluate(20, seed=10_000)
    finally:
        trainer.close()
        evaluator.close()
    print(f"{killer.kills} kills, {trainer.clock.env_steps} env steps, return {result.mean}")
    assert killer.kills >= SECONDS / 20
    assert result.mean >= 475
    assert all(torch.isfinite(parameter).all() for parameter in trainer.algorithm.parameters())
