"""Samplers propose the values of the next trial; the pruner stops bad trials early.

The results of samplers and pruner depend only on the directories: Optuna's studies are rebuilt for each call, with
generators seeded by the seed of the sweep and the number of the trial. There is no database, which a killed process
could corrupt.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from alfish.errors import UsageError
from alfish.parameters.varied import Parameter
from alfish.sweeps.trials import Trial


class TrialSampler(Protocol):
    """Proposes trials.

    Attributes:
      size: number of possible trials; None means no limit.
    """

    size: int | None

    def propose(self, number: int, trials: Sequence[Trial]) -> Mapping[str, str]:
        """Returns the bindings of trial `number`, as gin texts by parameter.

        Args:
          number: number of the trial, less than `size`.
          trials: trials with smaller numbers.
        """


class Grid:
    """All combinations of the values; the value of the last parameter changes fastest."""

    def __init__(self, parameters: Sequence[Parameter]):
        ranges = [f"{one.name}={one}" for one in parameters if one.is_range]
        if ranges:
            raise UsageError(
                f"--sampler=grid requires lists of values, but {ranges[0]} is a range; write grid(...) instead"
            )
        self._parameters = parameters
        self.size: int | None = math.prod(len(one.items) for one in parameters)

    def propose(self, number: int, trials: Sequence[Trial]) -> Mapping[str, str]:
        drawn = {}
        for one in reversed(self._parameters):
            number, index = divmod(number, len(one.items))
            drawn[one.name] = one.items[index]
        return {one.name: drawn[one.name] for one in self._parameters}


class Random:
    """Independent random values for each trial."""

    size: int | None = None

    def __init__(self, parameters: Sequence[Parameter], seed: int):
        self._parameters, self._seed = parameters, seed

    def propose(self, number: int, trials: Sequence[Trial]) -> Mapping[str, str]:
        generator = np.random.default_rng([self._seed, number])
        return {one.name: one.draw(generator) for one in self._parameters}


class TPE:
    """Optuna's tree-structured Parzen estimator, with ten random trials first."""

    size: int | None = None

    def __init__(self, parameters: Sequence[Parameter], seed: int):
        self._optuna = import_optuna("--sampler=tpe", "or use --sampler=random")
        self._parameters, self._seed = parameters, seed

    def propose(self, number: int, trials: Sequence[Trial]) -> Mapping[str, str]:
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        study = self._optuna.create_study(
            direction="maximize", sampler=self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        )
        distributions = {one.name: one.distribution() for one in self._parameters}
        study.add_trials([self._told(trial, distributions) for trial in trials])
        drawn = study.ask(distributions).params
        return {one.name: one.text(drawn[one.name]) if one.is_range else drawn[one.name] for one in self._parameters}

    def _told(self, trial: Trial, distributions: Mapping[str, Any]) -> Any:
        """Returns a trial for Optuna; an unfinished trial counts as bad (`constant_liar`)."""
        state = {"running": "RUNNING", "complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}[trial.state]
        return self._optuna.trial.create_trial(
            state=self._optuna.trial.TrialState[state],
            params={one.name: one.number(trial.bindings[one.name]) for one in self._parameters},
            distributions=distributions,
            value=trial.value if state == "COMPLETE" else None,
            intermediate_values={trial.steps: trial.value} if state == "PRUNED" else None,
        )


class MedianPruner:
    """Optuna's median pruner: stops a run whose best evaluation so far is below the median of other runs.

    A run is compared at the same step with the runs of the same seed in the trials that were complete when its trial
    was proposed. The result therefore does not depend on the time of the call. The pruner needs five such runs, and
    stops a run only at a step before the last evaluation of each of them.
    """

    def __init__(self) -> None:
        self._optuna = import_optuna("--prune", "or leave out --prune")
        self._pruner = self._optuna.pruners.MedianPruner()

    def pruned_at(self, trial: Trial, place: int, trials: Sequence[Trial]) -> int | None:
        """Returns the clock of the first evaluation after which a run must stop; None if the run continues.

        Args:
          trial: trial of the run.
          place: index of the run in `trial.runs`.
          trials: trials of the sweep, including all trials in `trial.seen`.
        """
        others = [other.runs[place].state.means for other in trials if other.number in trial.seen]
        others = [means for means in others if means]
        final = min((max(means) for means in others), default=0)
        means = {clock: value for clock, value in trial.runs[place].state.means.items() if clock < final}
        study = self._optuna.create_study(direction="maximize")
        study.add_trials([self._frozen("COMPLETE", seen, list(seen.values())[-1]) for seen in others])
        for clock in means:
            so_far = {step: value for step, value in means.items() if step <= clock}
            if self._pruner.prune(study, self._frozen("RUNNING", so_far)):
                return clock
        return None

    def _frozen(self, state: str, means: Mapping[int, float], value: float | None = None) -> Any:
        trial = self._optuna.trial
        return trial.create_trial(state=trial.TrialState[state], intermediate_values=dict(means), value=value)


def make_sampler(name: str, parameters: Sequence[Parameter], seed: int) -> TrialSampler:
    """Returns the sampler 'grid', 'random' or 'tpe'.

    Raises:
      UsageError: a parameter of a grid has a range, or Optuna is not installed.
    """
    if name == "grid":
        return Grid(parameters)
    return Random(parameters, seed) if name == "random" else TPE(parameters, seed)


def default_sampler(parameters: Sequence[Parameter]) -> str:
    """Returns 'grid' if every parameter is a grid(...), else 'tpe'."""
    return "grid" if all(one.kind == "grid" for one in parameters) else "tpe"


def import_optuna(what: str, instead: str) -> Any:
    """Imports Optuna.

    Raises:
      UsageError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise UsageError(f"{what} needs the extra 'sweep': pip install 'alfish[sweep]', {instead}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
