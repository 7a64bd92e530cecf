"""Shared parts of runs of `benchmarks.time_to_threshold`: the tasks, the clock, and the end of a run.

Such a run trains the library's own recipe until an evaluation reaches the task's threshold, or the recipe's budget is
spent, and prints one JSON object: the fields of `Race.result`.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.runs import script

EVALUATION_SEED = 10_000  # of episode 0, the others follow; far from what environments train with


@dataclass(frozen=True)
class Task:
    """A threshold for all libraries, and the evaluation that checks it."""

    name: str  # of alfish's conf, and of the peers' recipes
    env_id: str
    threshold: float  # of the mean return of an evaluation
    period: int  # environment steps between evaluations
    num_episodes: int


TASKS = {
    task.name: task
    for task in (
        Task("ppo_cartpole", "CartPole-v1", 475.0, 2000, 20),
        Task("dqn_cartpole", "CartPole-v1", 475.0, 2000, 20),
        Task("sac_pendulum", "Pendulum-v1", -170.0, 500, 20),
        Task("ppo_halfcheetah", "HalfCheetah-v5", 2000.0, 10_000, 5),
        Task("sac_halfcheetah", "HalfCheetah-v5", 4000.0, 5000, 5),
    )
}


class Race:
    """The clock of one run, stopped during evaluations.

    Args:
      task: what is to be reached.
      started: `time.monotonic()` when the process was started; that clock is the same in all processes.
      max_env_steps: the run is over then, whatever its budget.

    Attributes:
      result: None until the run is over. Seconds and steps are those at the end of the last iteration before the
        evaluation that ended it.
    """

    def __init__(self, task: Task, started: float, max_env_steps: int | None = None):
        self.task = task
        self.result: dict | None = None
        self._max_env_steps = max_env_steps
        self._next = task.period
        self._started = started
        self._stopped_wall = self._stopped_cpu = 0.0

    @contextmanager
    def stopped_clock(self) -> Iterator[None]:
        """Context whose wall and CPU seconds do not count."""
        wall, cpu = time.monotonic(), script.cpu_seconds()
        yield
        self._stopped_wall += time.monotonic() - wall
        self._stopped_cpu += script.cpu_seconds() - cpu

    def is_over(self, env_steps: int, updates: int, spent: bool, evaluate: Callable[[], float]) -> bool:
        """Returns whether the run is over; evaluates if an evaluation is due. Call it after every iteration.

        Args:
          env_steps, updates: so far.
          spent: whether the run's own budget is.
          evaluate: returns the mean return of the task's episodes.
        """
        if self.result is not None:
            return True
        spent = spent or (self._max_env_steps is not None and env_steps >= self._max_env_steps)
        if env_steps < self._next and not spent:
            return False
        self._next = (env_steps // self.task.period + 1) * self.task.period
        wall = time.monotonic() - self._started - self._stopped_wall
        cpu = script.cpu_seconds() - self._stopped_cpu
        with self.stopped_clock():
            mean = evaluate()
        print(f"{env_steps:,} env steps, {wall:.1f} s: {mean:.1f}", file=sys.stderr, flush=True)
        reached = mean >= self.task.threshold
        if reached or spent:
            self.result = {"reached": reached, "mean": mean, "wall_seconds": wall, "cpu_seconds": cpu}
            self.result |= {"env_steps": env_steps, "updates": updates, "evaluation_seconds": self._stopped_wall}
        return self.result is not None

    def print_result(self, versions: str) -> None:
        """Prints the result as a JSON object; raises SystemExit if the run ended before its end was found."""
        if self.result is None:
            raise SystemExit("the run ended before its budget was spent")
        print(json.dumps(self.result | {"versions": versions}))
