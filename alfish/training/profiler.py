"""Where a run's time goes, part by part, and what to do about it."""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import gin
import torch

from alfish import specs
from alfish.data import StepType
from alfish.parameters import NonNegativeFloat, NonNegativeInt, checked
from alfish.training.listeners import Listener, Report

if TYPE_CHECKING:
    from alfish.training.trainer import Trainer

LOOP, ENVIRONMENT, POLICY, UNROLL = "the loop", "environment", "policy", "unroll, the rest"
WORKERS = "waiting for workers, and taking over their rows"
STORE, SAMPLE, UPDATE, METRICS = "batches: taking rows in", "batches: putting batches together", "updates", "metrics"
SHARES = {
    "worker_wait_share": "waiting for the trainer",
    "worker_env_share": "environments",
    "worker_policy_share": "policy",
    "worker_copy_share": "copying",
}
LISTENERS = "evaluation, checkpoints, summaries"
LONG_UPDATE = 1000  # microseconds, from which threads can share out what a compiled update does


@gin.configurable(module="alfish")
@checked
class Profile(Listener):
    """Measures each part of the loop, and prints a table at the end of the run, or when it is interrupted.

    A part's time is without that of the parts it calls. What comes before `warmup_updates` is not counted: start-up,
    compilation, warm-up of replay. Also writes `trace.json`, one torch operation after another for a while, which
    https://ui.perfetto.dev and chrome://tracing show.

    Args:
      warmup_updates: gradient steps before measuring begins.
      trace_seconds: at least so long is traced, in whole iterations, and left out of the table; 0: no trace.
    """

    def __init__(self, warmup_updates: NonNegativeInt = 16, trace_seconds: NonNegativeFloat = 0.5):
        self._warmup_updates, self._trace_seconds = warmup_updates, trace_seconds
        self._seconds: dict[str, float] = defaultdict(float)
        self._calls: dict[str, int] = defaultdict(int)
        self._stack: list[list[float]] = []  # of the parts under way, the seconds of their callees
        self._began: float | None = None  # when counting began
        self._total = 0.0
        self._before = (0, 0)  # steps and updates then
        self._trace: Any = None
        self._trace_began = 0.0
        self._traced = trace_seconds == 0
        self._steps = self._updates = 0
        self._shares: dict[str, float] = {}  # of workers' time, by what for

    def start(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        if trainer.unroller.drains:
            self._time(trainer.unroller, "unroll", WORKERS)
        else:
            self._time(trainer.environment, "step", ENVIRONMENT)
            self._time(trainer.environment, "reset", ENVIRONMENT)
            self._time(trainer.unroller, "act", POLICY)
            self._time(trainer.unroller, "unroll", UNROLL)
        self._time(trainer.metrics, "update", METRICS)
        self._time(trainer.batches, "add", STORE)
        self._time(trainer.learner, "_update", UPDATE)
        chunks = trainer.batches.chunks

        def timed(steps: int) -> Iterator[Any]:
            iterator = chunks(steps)
            while True:
                with self._part(SAMPLE):
                    chunk = next(iterator, None)
                if chunk is None:
                    return
                yield chunk

        trainer.batches.chunks = timed  # type: ignore[method-assign]
        for listener in trainer.listeners:
            if listener is not self:
                self._time(listener, "after_iteration", LISTENERS)

    def after_iteration(self, trainer: "Trainer", report: Report) -> None:
        now = time.perf_counter()
        if self._trace is not None and (now - self._trace_began >= self._trace_seconds or report.finished):
            self._trace.__exit__(None, None, None)
            self._trace.export_chrome_trace(str(trainer.root_dir / "trace.json"))
            self._trace, self._traced = None, True
        elif self._trace is None and not self._traced and report.updates >= self._warmup_updates:
            self._trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._trace.__enter__()
            self._trace_began = time.perf_counter()
        if self._began is not None:
            self._shares |= {
                name: report.scalars[f"unroller/{name}"] for name in SHARES if report.scalars.get(f"unroller/{name}")
            }
            self._total = now - self._began
            self._steps, self._updates = report.steps - self._before[0], report.updates - self._before[1]
        elif self._traced and report.updates >= self._warmup_updates:
            self._began, self._before = time.perf_counter(), (report.steps, report.updates)

    def close(self) -> None:
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            self._trace = None
        if self._steps:
            self._trainer.log(self.table())

    def table(self) -> str:
        """Where the time went, and what to change."""
        seconds = dict(self._seconds)
        seconds[LOOP] = self._total - sum(seconds.values())
        lines = [
            f"{self._steps / self._total:,.0f} steps/s, {self._updates / self._total:,.0f} updates/s over "
            f"{self._total:.1f} s",
            f"  {'share':>6}  {'us a step':>10}  {'us a call':>10}  part",
        ]
        for part, value in sorted(seconds.items(), key=lambda item: -item[1]):
            share, each = value / self._total, 1e6 * value / self._steps
            call = f"{1e6 * value / self._calls[part]:10,.1f}" if self._calls[part] else " " * 10
            lines.append(f"  {share:6.1%}  {each:10,.1f}  {call}  {part}")
        if self._shares:
            parts = ", ".join(f"{share:.0%} {SHARES[name]}" for name, share in self._shares.items())
            lines.append(f"  workers: {parts}")
        return "\n".join([*lines, *(f"  - {advice}" for advice in self._advice(seconds))])

    def _advice(self, seconds: dict[str, float]) -> Iterator[str]:
        share = defaultdict(float, {part: value / self._total for part, value in seconds.items()})
        each = self._per_call(ENVIRONMENT, seconds) / self._trainer.environment.num_envs
        idle = self._shares.get("worker_wait_share", 0.0)
        if share[WORKERS] > 0.2 and idle < 0.2:
            yield (
                "workers are the slower side: more of them (AsyncUnroller.num_workers) where there are cores for them, "
                "or more environments in each"
            )
        elif self._shares and idle > 0.5:
            yield "training is the slower side, and workers wait for it: fewer of them would do"
        if share[UPDATE] > 0.4 and self._trainer.device.type == "cpu":
            if self._trainer.learner.is_plain:
                yield "most of it is updates: Learner.compile = True makes one graph of each; longer runs do so anyway"
            elif self._per_call(UPDATE, seconds) > LONG_UPDATE and torch.get_num_threads() < (os.cpu_count() or 1):
                yield "most of it is updates: more of Trainer.num_threads share them out, on an idle machine alone"
        if share[ENVIRONMENT] > 0.4 and each > 50:
            yield (
                f"most of it is the environment, {each:,.0f} us a step: make_environment.vectorization = 'async', with "
                "more environments, steps them side by side"
            )
        if share[POLICY] > 0.3 and self._trainer.environment.num_envs < 8:
            yield "acting is dear: make_environment.num_envs shares one call of the policy between environments"
        if share[LISTENERS] > 0.1:
            yield "listeners take their share: raise Evaluate.period, CheckpointSaver.period or Trainer.summary_period"

    def _per_call(self, part: str, seconds: dict[str, float]) -> float:
        return 1e6 * seconds.get(part, 0) / max(1, self._calls[part])

    def _time(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self._part(part):
                return function(*arguments, **keywords)

        setattr(owner, name, timed)

    @contextlib.contextmanager
    def _part(self, part: str) -> Iterator[None]:
        callees = [0.0]
        self._stack.append(callees)
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self._stack.pop()
            if self._stack:
                self._stack[-1][0] += spent
            if self._began is not None:
                self._seconds[part] += spent - callees[0]
                self._calls[part] += 1


def throughput_limits(trainer: "Trainer", seconds: float = 3.0) -> str:
    """How fast this run could be if parts of it cost nothing: environments alone, and collecting without training.

    Args:
      trainer: newly made; it cannot train afterwards.
      seconds: that each is measured for.
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
    trainer.unroller.unroll(length)  # what comes once: workers start, the policy is translated
    collected, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        trainer.unroller.unroll(length)
        assert trainer.unroller.records is not None
        collected += int((trainer.unroller.records.step_type != StepType.PAD).sum())
    rate = collected / (time.perf_counter() - began)
    trainer.close()
    return (
        f"environments alone, in one process: {alone_rate:,.0f} steps/s\n"
        f"collecting, without training: {rate:,.0f} steps/s ({trainer.unroller.num_envs} environments)"
    )
