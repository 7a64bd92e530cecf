"""Time of the phases of an iteration."""

import gin

from alfish.parameters import checked
from alfish.runs.timer import LOOP
from alfish.training.diagnostics.diagnostic import Diagnostic, LastUpdate
from alfish.training.listener import LISTENERS, Run
from alfish.training.loop import COLLECT, METRICS, SAMPLE, STORE, UPDATE
from alfish.writers import Shown

PHASES = {
    COLLECT: "collect",
    METRICS: "metrics",
    STORE: "store",
    SAMPLE: "sample",
    UPDATE: "update",
    LISTENERS: "listeners",
    LOOP: "rest",
}


@gin.configurable(module="alfish.training.diagnostics")
@checked
class PhaseTimes(Diagnostic):
    """Milliseconds of an iteration in each of its phases, the mean since this diagnostic was last shown."""

    def start(self, run: Run) -> None:
        run.timer.start()
        self._before, self._iterations = dict(run.timer.seconds), run.clock.iterations

    def measure(self, run: Run, update: LastUpdate) -> dict[str, Shown]:
        now, iterations = dict(run.timer.seconds), run.clock.iterations
        count = max(1, iterations - self._iterations)
        spent = {phase: now.get(phase, 0.0) - self._before.get(phase, 0.0) for phase in PHASES}
        self._before, self._iterations = now, iterations
        return {f"time/phase/{name}_ms": 1000 * spent[phase] / count for phase, name in PHASES.items()}
