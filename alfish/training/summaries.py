"""The listener that writes summaries: scalars, histograms, images and films of a run."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from alfish.errors import UsageError
from alfish.errors.user_code import calling
from alfish.learner.batches import Minibatches
from alfish.nest import Nest
from alfish.parameters import PositiveInt, checked
from alfish.parameters.description import CONFIG_FILE, OPERATIVE_FILE
from alfish.parameters.differences import values
from alfish.parameters.kinds import shown
from alfish.runs import contents
from alfish.runs.writers import CSVWriter, Histogram, Image, MultiWriter, RunOrigin, Shown, TensorBoardWriter, Writer
from alfish.runs.writers.writer import shown_value
from alfish.training.clock import next_due
from alfish.training.diagnostics import (
    Diagnostic,
    DormantUnits,
    ExplainedVariance,
    Histograms,
    LastUpdate,
    ModuleNorms,
    PhaseTimes,
)
from alfish.training.diagnostics.diagnostic import reading
from alfish.training.listener import Listener, Report, Run


@gin.configurable(module="alfish.training.listeners")
@checked
class Summaries(Listener):
    """Writes a run's summaries to TensorBoard (`tensorboard/`), to `metrics.csv`, and to experiment trackers.

    docs/monitoring.md has a table of all names.

    Args:
      diagnostics: instances of diagnostics; None means `ModuleNorms`, `DormantUnits`, `ExplainedVariance`, `Histograms`
        and `PhaseTimes`.
      diagnostics_period: number of clock steps between two measurements of the diagnostics. The first measurement is at
        the first summary with an update.
      custom_summary: function called with the `Run` at each summary; returns a dict from names to numbers, arrays
        (shown as histograms) or images (`[H, W, 3]` uint8), which are shown as `custom/NAME`. None means no function.
      writers: instances of writers in addition to the writers of TensorBoard and metrics.csv: `WandbWriter`,
        `MlflowWriter`, `TrackioWriter`, or your own.
    """

    def __init__(
        self,
        diagnostics: Sequence[Diagnostic] | None = None,
        diagnostics_period: PositiveInt = 10_000,
        custom_summary: Callable[[Run], Mapping[str, Any]] | None = None,
        writers: Sequence[Writer] = (),
    ):
        if diagnostics is None:
            diagnostics = [ModuleNorms(), DormantUnits(), ExplainedVariance(), Histograms(), PhaseTimes()]
        for kind, name, given in (Diagnostic, "diagnostics", diagnostics), (Writer, "writers", writers):
            for one in given:
                if not isinstance(one, kind):
                    raise UsageError(
                        f"Summaries.{name} has {shown(one)}, which is not a {kind.__name__}; derive its class from "
                        f"{kind.__name__}"
                    )
        self._diagnostics = list(diagnostics)
        self._period = diagnostics_period
        self._custom_summary = custom_summary
        self._extra_writers = writers
        self._writer, self._is_described = Writer(), False
        self._started = contextlib.ExitStack()  # closes diagnostics and writers that were started
        self._next: float = math.inf  # clock of the next measurement of the diagnostics
        self._updates: dict[str, LastUpdate] = {}  # last update of each policy, if diagnostics are due

    def start(self, run: Run) -> None:
        resumed = run.clock.value  # 0 also after a kill before the first checkpoint; rows of that process are removed
        directory = run.directory.path
        origin = RunOrigin(directory, run.directory.checkpoints.origin.run or "", run.log)
        with contextlib.ExitStack() as stack:  # closes what has started if another part cannot start
            for diagnostic in self._diagnostics:
                diagnostic.start(run)
                stack.callback(diagnostic.close)
            for writer in self._extra_writers:
                writer.start(origin)
                stack.callback(writer.close)
            events = TensorBoardWriter(directory / "tensorboard", resumed + 1)
            stack.callback(events.close)
            table = CSVWriter(directory / "metrics.csv", resumed)
            stack.callback(table.close)
            self._started = stack.pop_all()
        self._writer = MultiWriter([events, table, *self._extra_writers])
        self._next = next_due(resumed, self._period, self._next) if resumed else 0

        for name, own in run.by_policy().items():
            own.learner.before_update = self._before_update(own, name) if self._diagnostics else None

    def _before_update(self, run: Run, name: str) -> Callable[[Minibatches, Nest], Callable[[], None] | None]:
        """Returns the function that records an update of a policy for diagnostics, see `Learner.before_update`."""

        def before_update(chunk: Minibatches, index: Nest) -> Callable[[], None] | None:
            if run.clock.value < self._next:
                return None
            update = LastUpdate(chunk, index, dict(run.algorithm.named_parameters()))

            def made() -> None:
                self._updates[name] = update

            return made

        return before_update

    def after_iteration(self, run: Run, report: Report) -> None:
        if not self._is_described:
            self._describe(run, report)
        measured: dict[str, Shown] = {}
        try:
            with run.signals.breaking():  # environments and functions of the user can block
                measured = self._measured(run, report)
        finally:  # values are written even if diagnostics are interrupted
            self._write(report, measured)

    def _write(self, report: Report, measured: Mapping[str, Shown]) -> None:
        for name, value in measured.items():
            if isinstance(value, Histogram):
                self._writer.histogram(name, value, report.clock)
            elif isinstance(value, Image):
                self._writer.image(name, value, report.clock)
            else:
                report.scalars[name] = value
        for name, path in report.films.items():
            self._writer.film(name, path, report.nominal_clock.get(name.partition("/")[0], report.clock))
        if report.scalars:
            self._write_scalars(report)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]

    def close(self) -> None:
        self._started.close()

    def _describe(self, run: Run, report: Report) -> None:
        """Writes the configuration and the provenance; called when both are complete, after the first iteration."""
        self._is_described = True
        for name, text in run.directory.config.items():
            self._writer.text(name, f"```\n{text}\n```", report.clock)
        texts = run.directory.saved_config()
        provenance = contents.json_value(run.directory.path, "provenance.json")[-1]
        self._writer.describe(values(texts.get(OPERATIVE_FILE) or texts[CONFIG_FILE]), texts, provenance)

    def _measured(self, run: Run, report: Report) -> dict[str, Shown]:
        """Returns the values of diagnostics and of the custom summary, if they are due."""
        measured: dict[str, Shown] = {}
        if self._updates:
            measured |= self._diagnosed(run)
            self._updates = {}
            self._next = next_due(report.clock, self._period)
        if self._custom_summary is not None and report.is_summary:
            measured |= _custom(self._custom_summary, run)
        return measured

    def _diagnosed(self, run: Run) -> dict[str, Shown]:
        """Returns the values of diagnostics. With several policies, a name has the policy as its second part."""
        measured: dict[str, Shown] = {}
        for diagnostic in self._diagnostics:
            if not diagnostic.is_of_policy:
                measured |= diagnostic.measure(run, next(iter(self._updates.values())))
                continue
            for name, update in self._updates.items():
                for key, value in diagnostic.measure(run.by_policy()[name], update).items():
                    kind, _, rest = key.partition("/")
                    measured[f"{kind}/{name}/{rest}" if name else key] = value
        return measured

    def _write_scalars(self, report: Report) -> None:
        others = dict(report.scalars)
        counters = report.counters
        nominal = {prefix: steps for prefix, steps in report.nominal_clock.items() if steps != report.clock}
        for prefix, steps in sorted(nominal.items(), key=lambda item: item[1]):
            own = {name: others.pop(name) for name in report.scalars if name.startswith(f"{prefix}/")}
            if own:
                self._writer.scalars(own, counters._replace(steps=steps))
        if others:
            self._writer.scalars(others, counters)


def _custom(function: Callable[[Run], Mapping[str, Any]], run: Run) -> dict[str, Shown]:
    """Returns the values of a custom summary.

    Raises:
      CodeError: the function raised an error.
      UsageError: the function returned a value that cannot be shown.
    """
    name = getattr(function, "__name__", type(function).__name__)
    with calling(f"Summaries.custom_summary {name}"), reading(run.algorithm):
        found = function(run)
    if not isinstance(found, Mapping):
        raise UsageError(
            f"Summaries.custom_summary {name} returned {shown(found)}; it must return a dict from names to numbers, "
            "arrays or images"
        )
    measured: dict[str, Shown] = {}
    for key, value in found.items():
        try:
            measured[f"custom/{key}"] = shown_value(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"Summaries.custom_summary {name} returned {shown(value)} as {key!r}; it must be a number, an array of "
                "numbers, or an image [H, W, 3] of uint8"
            ) from error
    return measured
