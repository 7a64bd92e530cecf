"""The common part of sweeps and populations: settings, a file in a group's directory, and the training of runs.

All state is in directories, so that each process can be killed at any time.
"""

import abc
import contextlib
import dataclasses
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from alfish.analysis.run_source import EVALUATION
from alfish.analysis.tables import as_csv
from alfish.errors import UsageError, printable
from alfish.parameters import NonNegativeInt, PositiveInt
from alfish.parameters.description import CONFIG_FILE
from alfish.parameters.varied import Parameter
from alfish.runs import contents, files
from alfish.runs.checkpoints import RUN_FILE
from alfish.runs.files import make_directory, write_atomically
from alfish.runs.stop_signals import StopSignals
from alfish.sweeps.base import BASE, Base
from alfish.sweeps.jobs import JobEnded, Jobs
from alfish.sweeps.run_state import Endings, mark_failed
from alfish.training.evaluations.evaluation import ENV_INFO

MAX_RUNS = 1_000_000  # maximum number of runs of a group
PERIOD_SECONDS = 1.0  # seconds between two checks of signals and evaluations

MEAN_RETURN = f"{EVALUATION}/mean_return"
Kind = TypeVar("Kind", bound="Specification")


@dataclass(frozen=True)
class Specification(abc.ABC):
    """Settings of a group of runs, stored in a file in the group's directory. Each field is a flag of the command.

    Attributes:
      group: noun for the group in messages, and beginning of the file's name.
      varied: name of the field with the parameters that differ between runs; it maps parameters to values, written as
        in the flag.
      example: example of an argument of that flag.
      extendable: name of the only field that may change when the group is continued.
      factors: names of the fields whose product is the number of runs.
      seed: value of `Trainer.seed` in the first run.
      last: number of final evaluations of a run; their mean is the run's value.
      objective: scalar of the evaluations that is the value of a run, larger is better: 'evaluation/mean_return',
        'evaluation/mean_return/NAME' for an entry of a vector reward or a policy of a game, or
        'evaluation/env_info/NAME' for a number in the infos (`Trainer.evaluation_infos`).
    """

    group: ClassVar[str]
    varied: ClassVar[str]
    example: ClassVar[str]
    extendable: ClassVar[str]
    factors: ClassVar[tuple[str, ...]]

    seed: NonNegativeInt
    last: PositiveInt
    objective: str = field(default=MEAN_RETURN, kw_only=True)  # groups of older versions have no such field

    def __post_init__(self) -> None:
        _ = self.column
        if self.num_runs > MAX_RUNS:
            raise UsageError(
                f"a {self.group} of {self.num_runs:,} runs exceeds the limit of {MAX_RUNS:,} runs; reduce "
                f"{' or '.join(f'--{name}' for name in self.factors)}"
            )

    @property
    def column(self) -> str:
        """Column of `objective` in the tables of the evaluations.

        Raises:
          UsageError: there is no such column.
        """
        evaluation, _, name = self.objective.partition("/")
        kind, _, entry = name.partition("/")
        if evaluation == EVALUATION and kind == "mean_return" and (entry or name == kind):
            return "return" + name.removeprefix(kind)
        if evaluation == EVALUATION and kind + "/" == ENV_INFO and entry:
            return name
        raise UsageError(
            f"--objective is {self.objective!r}; it must be {MEAN_RETURN}, {MEAN_RETURN}/NAME or "
            f"{EVALUATION}/{ENV_INFO}NAME"
        )

    @property
    def value_words(self) -> str:
        """Label of an axis with the values of runs."""
        return f"{self.column} of the last {'evaluation' if self.last == 1 else f'{self.last} evaluations'}"

    @property
    def num_runs(self) -> int:
        """Number of all runs."""
        return math.prod(getattr(self, name) for name in self.factors)

    @staticmethod
    @abc.abstractmethod
    def parse(argument: str) -> Parameter:
        """Returns a parameter that differs between runs, from an argument of the flag."""

    @classmethod
    @abc.abstractmethod
    def completed(cls: type[Kind], known: Mapping[str, Any], base: Base) -> Kind:
        """Returns the specification with known values, and defaults for all other fields.

        Args:
          known: values by field, with at least `varied` and `seed`.
          base: configuration of the runs.

        Raises:
          UsageError: the values are inconsistent, or do not fit the configuration.
        """

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Parameters that differ between runs, as `parse` returns them."""
        return tuple(self.parse(f"{name}={values}") for name, values in getattr(self, self.varied).items())

    @classmethod
    def file(cls, directory: Path) -> Path:
        """Returns the path of the file, which marks the directory of a group."""
        return directory / f"{cls.group}.json"

    @classmethod
    def read(cls: type[Kind], directory: Path) -> Kind:
        """Reads the specification of an existing group.

        Raises:
          UsageError: the group does not exist.
        """
        path = cls.file(directory)
        if not os.path.lexists(path):
            raise UsageError(f"{directory} is not a {cls.group} of `alfish {cls.group}`: it has no {path.name}")
        content = contents.record(directory, path.name, {cls.varied: dict}) or {}
        try:
            specification = cls(**content)
            _ = specification.parameters  # parsed here, so that errors name this file
            return specification
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path} is not the specification of a {cls.group} ({printable(str(error))}); choose another --root_dir"
            ) from error

    def write(self, directory: Path) -> None:
        """Writes the file."""
        write_atomically(self.file(directory), json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def open(
        cls: type[Kind],
        directory: Path,
        gin_files: Sequence[str],
        bindings: Sequence[str],
        given: Mapping[str, Any],
        allow_import: Sequence[str] = (),
    ) -> Kind:
        """Returns the specification of a new group, or the specification of the group in a directory.

        A new specification is checked, and written with the configuration. For an existing group, given values must
        equal stored values, except for the `extendable` field. Fields that are not given keep their stored values.

        Args:
          directory: directory of the group.
          gin_files, bindings: gin files and bindings, as for `reading.read`.
          given: values of flags by name; the value of `varied` is a list of arguments. None or an empty list means that
            the flag was not given.
          allow_import: modules that an existing group's configuration may import if no gin file is given.

        Raises:
          UsageError: the settings are invalid, or the directory holds a different group or other files.
        """
        cls._refuse_other_content(directory)
        stored = cls.read(directory) if os.path.lexists(cls.file(directory)) else None
        given = {name: value for name, value in given.items() if value not in (None, [])}
        if cls.varied in given:
            given[cls.varied] = cls._values(given[cls.varied])
        known = (dataclasses.asdict(stored) if stored is not None else {}) | given
        if stored is None and not gin_files:
            raise UsageError("--gin_file is missing: `alfish confs` lists what can be trained")
        if bindings and not gin_files:
            raise UsageError(f"--gin_param needs --gin_file; without both, the {cls.group} keeps its configuration")
        if stored is not None and known[cls.varied] == getattr(stored, cls.varied):
            known[cls.varied] = getattr(stored, cls.varied)  # keeps the stored order, which trials and tables use
        if cls.varied not in known:
            raise UsageError(
                f"--{cls.varied} is missing: give a parameter and its values, as in --{cls.varied}={cls.example}"
            )
        variants = corners([cls.parse(f"{name}={values}") for name, values in known[cls.varied].items()])
        if gin_files:
            base = Base.read(gin_files, bindings, variants)
        else:
            base = Base.read_copy(directory, variants, allow_import)
        specification = cls.completed(known | {"seed": base.seed}, base)
        changes = base.difference(directory) if stored is not None and gin_files else ""
        if stored is not None and (changes := f"{changes}\n{stored.difference(specification)}".strip()):
            raise UsageError(
                f"{directory} is a {cls.group} with another specification (- then, + now):\n{changes}\n"
                "choose another --root_dir, or leave out what should not change"
            )
        if gin_files:
            make_directory(directory)
            base.write(directory)  # written even if equal, to mark the text as trusted
        if specification != stored:
            specification.write(directory)
        return specification

    @classmethod
    def _refuse_other_content(cls, directory: Path) -> None:
        """Raises UsageError if a directory has files that do not belong to the group."""
        if os.path.lexists(cls.file(directory)) or not directory.is_dir():
            return
        names = {path.name for path in directory.iterdir() if not path.name.startswith(".")} - {BASE}
        if names:
            kinds = {RUN_FILE: "a run", "sweep.json": "a sweep", "population.json": "a population"}
            kind = next((kind for name, kind in kinds.items() if name in names), "a directory with other files")
            raise UsageError(f"{directory} is {kind}; choose another --root_dir")

    @classmethod
    def _values(cls, arguments: Sequence[str]) -> dict[str, str]:
        """Returns the values of each parameter in arguments of the flag `varied`."""
        parameters = [cls.parse(argument) for argument in arguments]
        names = [parameter.name for parameter in parameters]
        for name in names:
            if names.count(name) > 1:
                raise UsageError(
                    f"--{cls.varied} has {name} {names.count(name)} times; give all its values in one flag"
                )
        return {parameter.name: str(parameter) for parameter in parameters}

    def difference(self, other: "Specification") -> str:
        """Returns the lines in which `other` differs from this specification, except the `extendable` field."""
        pairs = zip(dataclasses.asdict(self).items(), dataclasses.asdict(other).values())
        changes = [(name, old, new) for (name, old), new in pairs if old != new and name != self.extendable]
        return "".join(f"-{name} = {old}\n+{name} = {new}\n" for name, old, new in changes)


class Due(NamedTuple):
    """A run to start.

    Attributes:
      directory: directory of the run.
      settings: bindings of this run only, as values by parameter.
      arguments: further arguments of `alfish train`.
    """

    directory: Path
    settings: Mapping[str, Any]
    arguments: Sequence[str] = ()


@dataclass(eq=False)
class RunGroup(abc.ABC, Generic[Kind]):
    """Trains a group of runs.

    Attributes:
      directory: directory of the group, with its specification and its configuration.
      specification: specification of the group.
      jobs: object that starts the processes of runs.
      signals: signals of this process; after the first signal, `run` returns.
      log: function that receives a line for each event.
    """

    directory: Path
    specification: Kind
    jobs: Jobs
    signals: StopSignals
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._endings = Endings()

    @abc.abstractmethod
    def run(self) -> None:
        """Trains all runs until they have ended, or until a signal is received. The caller closes the jobs."""

    def _train(self, due: Callable[[], Iterator["Due"]], is_over: Callable[[Path], bool], unfinished: str) -> None:
        """Trains runs until none is due, or a signal is received.

        Args:
          due: function that returns the runs to train, including running ones. It is called at least once a second; a
            run is taken from the iterator only while fewer than `jobs.size` processes run.
          is_over: function that returns whether the run in a directory needs no further training.
          unfinished: reason of failure for a run that ended without an error, but is not over.
        """
        while self.signals.number is None:
            runs = filter(lambda run: run.directory not in self.jobs.running, due())
            while len(self.jobs.running) < self.jobs.size and self.signals.number is None:
                if (run := next(runs, None)) is None:
                    break
                self._start(run)
            if not self.jobs.running:
                return
            for ended in self.jobs.wait(PERIOD_SECONDS):
                self._settle(ended, is_over(ended.directory), unfinished)

    def _start(self, run: "Due") -> None:
        # Trained from the copy, because gin files may be edited in the meantime.
        copy = f"--gin_file={self.directory / BASE / CONFIG_FILE}"
        bindings = [f"--gin_param={name}={value}" for name, value in run.settings.items()]
        self.jobs.start(run.directory, [copy, *bindings, *run.arguments])

    def _settle(self, ended: JobEnded, is_over: bool, unfinished: str) -> None:
        """Marks a run as failed if it cannot continue after the end of its process."""
        name, reason = ended.directory.relative_to(self.directory), self._endings.failure(ended)
        if ended.status == 0 and not is_over:
            reason = unfinished
        if reason is not None:
            mark_failed(ended.directory, reason)
            self.log(f"{name} failed: {reason}")
        elif not is_over:
            self.log(f"{name} was stopped with status {ended.status} and is continued")


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Creates the directory of a group of runs, and locks it against other commands; removes it if it remains empty.

    Raises:
      UsageError: another command uses the directory.
    """
    make_directory(directory)
    holder = threading.Event()  # any weakly referenceable object
    unlock = files.lock(directory, holder)
    if unlock is None:
        raise UsageError(f"another command is running in {directory}; wait until it ends, or choose another --root_dir")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the directory may not be empty
            directory.rmdir()
        unlock()


def corners(parameters: Sequence[Parameter]) -> list[list[str]]:
    """Returns bindings of several runs that contain each example of each parameter at least once."""
    first = [parameter.items[0] for parameter in parameters]
    points = [first]
    for k, parameter in enumerate(parameters):
        points += [[*first[:k], item, *first[k + 1 :]] for item in parameter.examples[1:]]
    return [[f"{one.name}={value}" for one, value in zip(parameters, point)] for point in points]


def bindings_text(bindings: Mapping[str, str]) -> str:
    """Returns bindings as one line of text."""
    return ", ".join(f"{name} = {value}" for name, value in bindings.items())


def write_rows(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file; None becomes an empty cell."""
    write_atomically(path, as_csv(rows))
