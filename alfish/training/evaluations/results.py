"""Results, in the run's directory, of evaluations by a process other than the training process.

A result is first written to `eval/watch/`, atomically, with the policy, the environment and the episodes. The CSV in
`eval/` and the events in `tensorboard/watch/` are then derived from that file. If the process is killed in between, the
next process writes the missing CSV and events.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alfish.errors import UsageError, first_line
from alfish.runs import contents
from alfish.runs.contents import LARGEST_CLOCK
from alfish.runs.files import make_directory, write_atomically
from alfish.runs.writers import Counters, TensorBoardWriter
from alfish.training.evaluations.evaluation import Evaluation

WATCH = "watch"  # name of the directories of results in `eval/` and of events in `tensorboard/`


@dataclass(frozen=True)
class Episodes:
    """The episodes of an evaluation.

    Attributes:
      environment: description of the environment; equal environments have equal descriptions.
      seed: seed of episode 0.
      num_episodes: number of whole episodes.
      max_length: number of actions after which an episode is truncated.
    """

    environment: str
    seed: int
    num_episodes: int
    max_length: int


@dataclass(frozen=True)
class EvaluationResult:
    """An evaluation of a checkpoint.

    Attributes:
      steps, env_steps, iterations, updates, wall_seconds: counters of the checkpoint; `steps` names its file.
      policy: digest of the policy's weights and statistics.
      episodes: episodes of the evaluation.
      evaluation: returns and lengths of the episodes.
      film: file in the run's directory; None if there is no film.
    """

    steps: int
    env_steps: int
    iterations: int
    updates: int
    wall_seconds: float
    policy: str
    episodes: Episodes
    evaluation: Evaluation
    film: str | None = None

    @property
    def counters(self) -> Counters:
        return Counters(self.steps, self.env_steps, self.iterations, self.updates, self.wall_seconds)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_json(cls, content: Any) -> "EvaluationResult":
        """Returns the result in a JSON value that `to_json` returned.

        Raises:
          ValueError, TypeError, KeyError, AttributeError, OverflowError: the value has another form.
        """
        given = content["evaluation"]
        returns, lengths = tuple(map(float, given["returns"])), tuple(map(int, given["lengths"]))
        named = {
            field: {name: tuple(map(float, own)) for name, own in given.get(field, {}).items()}
            for field in ("by_objective", "infos")
        }
        evaluation = Evaluation(**{**given, "returns": returns, "lengths": lengths, **named})
        result = cls(**{**content, "episodes": Episodes(**content["episodes"]), "evaluation": evaluation})
        if not all(type(one) in (int, float) and 0 <= one < LARGEST_CLOCK for one in result.counters):
            raise ValueError("its counters are not numbers of steps")
        of_names = [own for values in named.values() for own in values.values()]
        if not returns or {len(own) for own in (lengths, *of_names)} != {len(returns)}:
            raise ValueError("it has different numbers of returns and lengths")
        if max(lengths) >= LARGEST_CLOCK or type(evaluation.seed) is not int or not isinstance(result.film, str | None):
            raise ValueError("its lengths or seed are not integers of at least 0, or its film is not a file name")
        return result


class Results:
    """The results under one name in a run's directory.

    Args:
      root_dir: directory of the run.
      name: name of files and scalars.

    Raises:
      UsageError: the name cannot be a file name.
    """

    def __init__(self, root_dir: Path, name: str):
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UsageError(f"--name is {name!r}; it must be one word of letters, digits, '_', '-' and '.'")
        self.name, self._root_dir = name, root_dir
        self.directory = root_dir / "eval" / WATCH
        self._events = root_dir / "tensorboard" / WATCH

    def all(self) -> dict[int, EvaluationResult]:
        """Returns the results by the steps of their checkpoints, ascending."""
        pattern = re.compile(rf"{re.escape(self.name)}-(\d{{12,}})\.json")
        found = (pattern.fullmatch(path.name) for path in sorted(self.directory.glob("*.json")))
        return {int(match[1]): self._read(int(match[1])) for match in found if match}

    def add(self, result: EvaluationResult) -> None:
        """Writes a result, and the files derived from it."""
        make_directory(self._events)
        self._events_of(result.steps).unlink(missing_ok=True)  # events of another policy at the same steps
        make_directory(self.directory)
        write_atomically(self._path(result.steps), result.to_json())
        self.complete(result)

    def complete(self, result: EvaluationResult) -> None:
        """Writes the CSV and the events of a result, unless they exist."""
        path, content = self.csv(result.steps), result.evaluation.to_csv()
        if contents.content(self._root_dir, f"eval/{path.name}") != content.encode():
            write_atomically(path, content)
        if not self._events_of(result.steps).exists():
            self._write_events(result)

    def csv(self, steps: int) -> Path:
        """Returns the path of the table of episodes, as training writes it."""
        return self._root_dir / "eval" / f"{self.name}-{steps:012d}.csv"

    def first_steps(self, newest: int) -> int:
        """Returns the steps of the first checkpoint to evaluate: `newest` of the first call, which a file stores."""
        path = self.directory / f"{self.name}.json"
        found = contents.record(self.directory, path.name, {"first_steps": int})
        if found is None:
            write_atomically(path, json.dumps({"first_steps": newest}) + "\n")
        return newest if found is None else found["first_steps"]

    def _read(self, steps: int) -> EvaluationResult:
        path = self._path(steps)
        content = contents.json_value(self._root_dir, f"eval/{WATCH}/{path.name}")
        try:
            return EvaluationResult.from_json(content)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UsageError(f"{path} is not a result of `alfish watch` ({first_line(error)}); remove it") from error

    def _path(self, steps: int) -> Path:
        return self.directory / f"{self.name}-{steps:012d}.json"

    def _events_of(self, steps: int) -> Path:
        # One file per result, so that a result is complete or missing. The steps come first, because TensorBoard reads
        # files in the order of names.
        return self._events / f"events.out.tfevents.{steps:012d}.{self.name}"

    def _write_events(self, result: EvaluationResult) -> None:
        unfinished = self.directory / f".{self.name}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
        writer = TensorBoardWriter(unfinished)
        writer.scalars(result.evaluation.scalars(self.name), result.counters)
        if result.film is not None and (film := self._root_dir / result.film).is_file():
            contents.check_inside(self._root_dir, result.film)
            writer.film(f"{self.name}/film", film, result.steps)
        writer.close()
        make_directory(self._events)
        for written in unfinished.iterdir():
            os.replace(written, self._events_of(result.steps))
        unfinished.rmdir()


def scalars_of(directory: Path) -> list[Mapping[str, Any]]:
    """Returns the results of a run in the form of rows of metrics.csv, ascending by steps."""
    found = sorted((directory / "eval" / WATCH).glob("*-" + "[0-9]" * 12 + ".json"))
    rows: list[Mapping[str, Any]] = []
    for path in found:
        name, _, steps = path.stem.rpartition("-")
        result = Results(directory, name)._read(int(steps))
        rows.append({**result.counters._asdict(), **result.evaluation.scalars(name)})
    return sorted(rows, key=lambda row: row["steps"])
