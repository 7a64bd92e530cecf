"""The specification of a sweep: `sweep.json`, beside the configuration that its runs share."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alfish.errors import UsageError
from alfish.runs.files import make_directory, write_atomically
from alfish.sweeps.base import Base, refuse_other_content
from alfish.sweeps.samplers import MedianPruner, default_sampler, make_sampler
from alfish.sweeps.search import Parameter, corners, parse

FILE = "sweep.json"
NUM_TRIALS = 20  # by default, of a sampler without an end


@dataclass(frozen=True)
class Specification:
    """What a sweep does.

    Attributes:
      search: what is varied, as `--search` has it, by parameter.
      sampler: one of `samplers.SAMPLERS`.
      sampler_seed: of the sampler.
      seeds: `Trainer.seed` of each run of a trial.
      last: number of evaluations at the end of a run whose mean is its value.
      prune: whether trials that are worse than others are stopped.
      trials: number of trials.
    """

    search: Mapping[str, str]
    sampler: str
    sampler_seed: int
    seeds: Sequence[int]
    last: int
    prune: bool
    trials: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """What is varied."""
        return parse([f"{name}={values}" for name, values in self.search.items()])

    @classmethod
    def read(cls, directory: Path) -> "Specification":
        """Reads the specification of an existing sweep.

        Raises:
          UsageError: there is none.
        """
        path = directory / FILE
        if not path.is_file():
            raise UsageError(f"{directory} is not a sweep of `alfish sweep`: it has no {FILE}")
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path} is not the specification of a sweep ({error}); choose another --root_dir"
            ) from error

    def write(self, directory: Path) -> None:
        """Writes `sweep.json`, whose presence makes a directory a sweep."""
        write_atomically(directory / FILE, json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def open_specification(
    directory: Path,
    files: Sequence[str],
    bindings: Sequence[str],
    given: Mapping[str, Any],
    allow_import: Sequence[str] = (),
) -> Specification:
    """Returns the specification of a new sweep, or that of the sweep in a directory.

    A new one is checked, and written with the configuration. For an existing one, whatever is given must be as it was
    then, except that the number of trials may change; what is not given is as it was.

    Args:
      directory: of the sweep.
      files, bindings: as `reading.read` takes them.
      given: values of flags by name: search (a list), sampler, sampler_seed, seeds (their number), last, prune, trials.
        None, or an empty list: not given.
      allow_import: modules that the configuration of an existing sweep may import, where no file is named.

    Raises:
      UsageError: the sweep cannot be as it is given; or the directory has another one, or something else.
    """
    refuse_other_content(directory, FILE)
    stored = Specification.read(directory) if (directory / FILE).is_file() else None
    if stored is None and not files:
        raise UsageError("--gin_file is missing: `alfish confs` lists what can be trained")
    if bindings and not files:
        raise UsageError("--gin_param needs --gin_file; without both, the sweep goes on with the configuration it has")
    variants = corners(parse(given["search"]) if stored is None or given["search"] else stored.parameters)
    if files:
        base = Base.read(files, bindings, variants)
    else:
        base = Base.read_copy(directory, variants, allow_import)
    specification = _completed(given, stored, base.seed)
    # Before anything is written: a grid of ranges, and Optuna where it is missing, are refused here.
    sampler = make_sampler(specification.sampler, specification.parameters, specification.sampler_seed)
    if specification.prune:
        MedianPruner()
    if sampler.size is not None:
        specification = dataclasses.replace(specification, trials=min(specification.trials, sampler.size))
    if stored is not None and (lines := base.difference(directory) or _difference(stored, specification)):
        raise UsageError(
            f"{directory} is a sweep with another specification (- then, + now):\n{lines}\n"
            "choose another --root_dir, or leave out what is not to change"
        )
    if files:
        make_directory(directory)
        base.write(directory)  # also where it is the same: this is the text that the user trusts
    if specification != stored:
        specification.write(directory)
    return specification


def _completed(given: Mapping[str, Any], stored: Specification | None, first_seed: int) -> Specification:
    """Returns the specification that the flags give; what they do not give is that of `stored`, or the default."""
    before = dataclasses.asdict(stored) if stored is not None else {}
    parameters = parse(given["search"]) if given["search"] or not before else ()
    search = {one.name: str(one) for one in parameters} or before["search"]
    sampler = given["sampler"] or before.get("sampler") or default_sampler(parameters)
    number = given["seeds"] or len(before.get("seeds", [0]))

    def value(name: str, default: Any) -> Any:
        return given[name] if given[name] is not None else before.get(name, default)

    return Specification(
        search=search,
        sampler=sampler,
        sampler_seed=value("sampler_seed", 0),
        seeds=list(range(first_seed, first_seed + number)),
        last=value("last", 1),
        prune=value("prune", False),
        trials=value("trials", 10**9 if sampler == "grid" else NUM_TRIALS),
    )


def _difference(before: Specification, after: Specification) -> str:
    """Returns the lines by which two specifications differ, except in the number of trials."""
    pairs = zip(dataclasses.asdict(before).items(), dataclasses.asdict(after).values())
    return "\n".join(
        f"- {name} = {old}\n+ {name} = {new}" for (name, old), new in pairs if old != new and name != "trials"
    )
