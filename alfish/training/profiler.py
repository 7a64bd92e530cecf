"""Profile of a run: the time of each part, and advice."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import gin
import torch

from alfish import specs
from alfish.compiler import kernels
from alfish.parameters import NonNegativeFloat, NonNegativeInt, checked
from alfish.runs.timer import LOOP
from alfish.training.listener import LISTENERS, Listener, Report, Run
from alfish.training.loop import COLLECT, UPDATE
from alfish.training.trainer import Trainer
from alfish.unrollers.unroller import ENVIRONMENT, POLICY

WORKERS = "waiting for workers, and receiving their rows"  # name that replaces COLLECT if other processes collect
SHARES = {
    "worker_wait_fraction": "waiting for the trainer",
    "worker_env_fraction": "environments",
    "worker_policy_fraction": "policy",
    "worker_copy_fraction": "copying",
}
LONG_UPDATE = 1000  # microseconds of a compiled update above which more threads are faster


class Measured(NamedTuple):
    """Work of a run, and the time that it took.

    Attributes:
      seconds: seconds of all parts together.
      clock: number of clock steps.
      updates: number of updates of the parameters.
      by_part: seconds of each part.
      calls: number of calls of each part.
    """

    seconds: float
    clock: int
    updates: int
    by_part: dict[str, float]
    calls: dict[str, int]

    def since(self, before: "Measured") -> "Measured":
        """Returns the difference from an earlier measurement."""
        by_part = {part: value - before.by_part.get(part, 0.0) for part, value in self.by_part.items()}
        calls = {part: value - before.calls.get(part, 0) for part, value in self.calls.items()}
        updates = self.updates - before.updates
        return Measured(self.seconds - before.seconds, self.clock - before.clock, updates, by_part, calls)

    def share(self, part: str) -> float:
        """Returns the fraction of the time that a part took."""
        return self.by_part.get(part, 0.0) / self.seconds

    def per_call(self, part: str) -> float:
        """Returns the microseconds per call of a part."""
        return 1e6 * self.by_part.get(part, 0.0) / max(1, self.calls.get(part, 0))


@gin.configurable(module="alfish")
@checked
class Profile(Listener):
    """Measures the time of each part of the loop; prints a table at the end or at an interruption.

    The time of a part excludes the parts inside it. Measuring begins after `warmup_updates`, so it excludes start-up,
    compilation and the warm-up of replay. The profile also writes `trace.json`, a trace of torch operations for
    https://ui.perfetto.dev and chrome://tracing.

    Args:
      warmup_updates: number of gradient steps before measuring begins.
      trace_seconds: minimum duration of the trace in seconds. The trace covers complete iterations, which the table
        excludes. 0 means no trace.
    """

    def __init__(self, warmup_updates: NonNegativeInt = 16, trace_seconds: NonNegativeFloat = 0.5):
        self._warmup_updates, self._trace_seconds = warmup_updates, trace_seconds
        self._trace: Any = None
        self._trace_began = 0.0
        self._traced = trace_seconds == 0
        self._before: Measured | None = None  # totals when measuring began
        self._measured: Measured | None = None  # work since measuring began
        self._worker_shares: dict[str, float] = {}  # fractions of workers' time, by scalar

    def start(self, run: Run) -> None:
        self._run = run
        run.timer.start()
        run.unroller.time(run.timer)

    def after_iteration(self, run: Run, report: Report) -> None:
        now = self._now(report)
        if self._trace is not None and (now.seconds - self._trace_began >= self._trace_seconds or report.finished):
            self._trace.__exit__(None, None, None)
            self._trace.export_chrome_trace(str(run.directory.path / "trace.json"))
            self._trace, self._traced = None, True
        elif self._trace is None and not self._traced and report.updates >= self._warmup_updates:
            self._trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._trace.__enter__()
            self._trace_began = time.perf_counter()
        if self._before is not None:
            shares = {name: report.scalars.get(f"unroller/{name}", 0.0) for name in SHARES}
            self._worker_shares |= {name: share for name, share in shares.items() if share}
            self._measured = now.since(self._before)
        elif self._traced and report.updates >= self._warmup_updates:
            self._before = self._now(report)

    def close(self) -> None:
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            self._trace = None
        if self._measured is not None and self._measured.clock:
            self._run.log(self.table())

    def table(self) -> str:
        """Returns the table of parts, with advice."""
        measured = self._measured
        assert measured is not None
        lines = [
            f"{measured.clock / measured.seconds:,.0f} steps/s, {measured.updates / measured.seconds:,.0f} updates/s "
            f"over {measured.seconds:.1f} s",
            f"  {'share':>6}  {'us/step':>10}  {'us/call':>10}  part",
        ]
        for part, value in sorted(measured.by_part.items(), key=lambda item: -item[1]):
            each = 1e6 * value / measured.clock
            call = f"{measured.per_call(part):10,.1f}" if measured.calls.get(part) else " " * 10
            lines.append(f"  {measured.share(part):6.1%}  {each:10,.1f}  {call}  {part}")
        if self._worker_shares:
            parts = ", ".join(f"{share:.0%} {SHARES[name]}" for name, share in self._worker_shares.items())
            lines.append(f"  workers: {parts}")
        if (helpers := kernels.helper_counts()).tasks:
            share = helpers.helped / helpers.tasks
            lines.append(f"  helpers: {share:.0%} of {helpers.calls:,} large products ({helpers.pauses} pauses)")
        idle = self._worker_shares.get("worker_wait_fraction", 0.0) if self._worker_shares else None
        return "\n".join([*lines, *(f"  - {line}" for line in advice(measured, self._run, idle))])

    def _now(self, report: Report) -> Measured:
        timer = self._run.timer
        seconds = timer.begin(LISTENERS)
        by_part, calls = dict(timer.seconds), dict(timer.calls)
        calls[UPDATE], calls[LOOP] = report.updates, 0
        if self._run.unroller.drains:
            by_part[WORKERS], calls[WORKERS] = by_part.pop(COLLECT, 0.0), calls.pop(COLLECT, 0)
        return Measured(seconds, report.clock, report.updates, by_part, calls)


def advice(measured: Measured, run: Run, worker_idle: float | None = None) -> Iterator[str]:
    """Yields advice on settings that would make a run faster.

    Args:
      measured: measurements of the run.
      run: run whose settings are considered.
      worker_idle: fraction of time that workers wait, in [0, 1]; None without workers.
    """
    num_envs = run.environment.num_envs
    env_step = measured.per_call(ENVIRONMENT) / num_envs
    if measured.share(WORKERS) > 0.2 and (worker_idle or 0.0) < 0.2:
        yield (
            "workers limit the speed: raise AsyncUnroller.num_workers if there are idle cores, or the number of "
            "environments per worker"
        )
    elif worker_idle is not None and worker_idle > 0.5:
        yield "training limits the speed, and workers wait for it: fewer workers would suffice"
    if measured.share(UPDATE) > 0.4 and run.device.type == "cpu":
        if run.learner.is_plain:
            yield (
                "updates take much of the time: Learner.compile = True compiles each update into one graph, as longer "
                "runs do by default"
            )
        elif measured.per_call(UPDATE) > LONG_UPDATE and kernels.num_threads() == 1 and kernels.available_cores() > 1:
            yield "updates take much of the time: Trainer.num_threads = 'auto' uses idle cores for large products"
    if measured.share(ENVIRONMENT) > 0.4 and env_step > 50:
        yield (
            f"environment steps take much of the time, {env_step:,.0f} us each: make_environment.vectorization = "
            "'async' with more environments steps them in parallel"
        )
    if measured.share(POLICY) > 0.3 and num_envs < 8:
        yield "acting is expensive: with a larger make_environment.num_envs, environments share one call of the policy"
    if measured.share(LISTENERS) > 0.1:
        yield "listeners take much of the time: raise Evaluate.period, CheckpointSaver.period or Trainer.summary_period"


def throughput_limits(trainer: Trainer, seconds: float = 3.0) -> str:
    """Measures two upper limits of a run's speed: environments alone, and collecting without training.

    Args:
      trainer: new trainer; it cannot train afterwards.
      seconds: length of each measurement.
    """
    environment = trainer.new_environment()
    environment.reset()
    count, alone = environment.num_envs, 0
    actions = [environment.convert(specs.sample(environment.action_spec, count)) for _ in range(64)]
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        environment.step(actions[alone % 64])
        environment.take_resets()
        alone += 1
    alone_rate = alone * count / (time.perf_counter() - began)
    environment.close()
    length = max(1, int(trainer.unroller.unroll_length))
    trainer.unroller.unroll(length)  # not measured: workers start, and the policy is compiled
    collected, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        trainer.unroller.unroll(length)
        collected += trainer.unroller.num_steps
    rate = collected / (time.perf_counter() - began)
    trainer.close()
    return (
        f"environments alone, in one process: {alone_rate:,.0f} steps/s\n"
        f"collecting, without training: {rate:,.0f} steps/s ({trainer.unroller.num_envs} environments)"
    )
