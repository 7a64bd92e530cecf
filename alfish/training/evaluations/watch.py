"""Evaluation of a run's checkpoints while another process trains."""

import csv
import dataclasses
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.environments import Environment
from alfish.errors import UsageError, counted
from alfish.runs import contents, files
from alfish.runs.checkpoint_file import BrokenCheckpoint
from alfish.training.evaluations.results import Episodes, EvaluationResult, Results
from alfish.training.films import Camera, Recorder
from alfish.training.trainer import Trainer

POLL_SECONDS = 1.0
# Seconds to wait for the row of metrics.csv, which older versions wrote after the checkpoint.
SETTLE_SECONDS = 1.0

# Identity of a checkpoint's file. The name is not enough: a run that continues from an earlier checkpoint reuses names.
FileId = tuple[int, int, int, int]


class Watch:
    """Evaluates each checkpoint of a run once, on the same episodes.

    Checkpoints that training has already evaluated on the same episodes are skipped. Only results and films are written
    to the directory, and training is not affected.

    Args:
      trainer: trainer of the run, built to read it.
      name: name of the result files and of the scalars.
      num_episodes: number of complete episodes in one evaluation.
      seed: seed of episode 0.
      num_envs: number of environments that step together; results do not depend on it.
      max_length: number of actions after which an episode is truncated; None means the trainer's max_evaluation_length.
      options: `environment` and `lineup` of the evaluations, see `Evaluate`.
      num_filmed: number of episodes in the film of each evaluation, side by side; 0 means no film.
      captions: whether films show return, reward, value and action.
      show: function that receives a line for each checkpoint.

    Attributes:
      num_evaluated: number of checkpoints that were evaluated.
      num_lost: number of checkpoints that were removed before they could be evaluated.

    Raises:
      UsageError: earlier results with this name come from other episodes, or another process also uses this name.
    """

    def __init__(
        self,
        trainer: Trainer,
        name: str,
        num_episodes: int,
        seed: int,
        num_envs: int = 8,
        max_length: int | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        num_filmed: int = 0,
        captions: bool = False,
        show: Callable[[str], Any] = print,
    ):
        self._trainer = trainer
        self._checkpoints = trainer.directory.checkpoints
        self._show = show
        self._results = Results(trainer.directory.path, name)
        self._unlock = self._lock()
        films = {"render_mode": "rgb_array"} if num_filmed else {}
        self._evaluator = trainer.evaluator(num_episodes, max(num_envs, num_filmed), max_length, **options, **films)
        environment = self._evaluator.environment
        lineup = f", lineup {options['lineup']}" if options.get("lineup") else ""
        self._episodes = Episodes(in_words(environment) + lineup, seed, num_episodes, self._evaluator.max_length)
        self._camera = Camera(environment, "--video") if num_filmed else None
        self._num_filmed, self._captions = num_filmed, captions
        self._known = self._results.all()
        self._check_known()
        self._check_training()
        self._done_with: set[FileId] = set()
        self.num_evaluated = self.num_lost = 0

    def run(self, all_kept: bool = False, idle_seconds: float = float("inf")) -> None:
        """Evaluates checkpoints until the run is finished, or no new checkpoint has appeared for `idle_seconds`.

        Args:
          all_kept: whether to begin with the oldest checkpoint. If not, the first checkpoint is the one that was newest
            when the run was first watched under this name.
          idle_seconds: seconds without a new checkpoint after which this call returns; 0 evaluates existing checkpoints
            only.
        """
        for result in self._known.values():
            self._results.complete(result)
        first = self._results.first_steps(max(self._checkpoints.steps(), default=0))
        if not all_kept:  # new checkpoints may have fewer steps, if the run falls back to an earlier one
            self._done_with |= {file_id for steps, file_id in self._pending() if steps < first}
        last_new = time.monotonic()
        while True:
            is_done = (self._trainer.directory.path / "done").exists()  # read before looking for the last checkpoint
            pending = next(self._pending(), None)
            if pending is not None:
                self._visit(*pending)
                last_new = time.monotonic()
            elif is_done or time.monotonic() - last_new >= idle_seconds:
                return
            else:
                time.sleep(POLL_SECONDS)

    def words(self) -> str:
        """Returns a sentence about the evaluated and removed checkpoints."""
        lost = f", {self.num_lost} removed before they could be evaluated" if self.num_lost else ""
        return f"{counted(self.num_evaluated, 'checkpoint')} evaluated{lost}"

    def close(self) -> None:
        """Closes the environments, and lets another process watch."""
        self._evaluator.close()
        self._unlock()

    def _pending(self) -> Iterator[tuple[int, FileId]]:
        """Yields the checkpoints that were not visited yet, in ascending order."""
        for steps in self._checkpoints.steps():
            try:
                status = os.stat(self._checkpoints.path(steps))
            except FileNotFoundError:  # training has removed the checkpoint meanwhile
                continue
            file_id = steps, status.st_ino, status.st_mtime_ns, status.st_size
            if file_id not in self._done_with:
                yield steps, file_id

    def _visit(self, steps: int, file_id: FileId) -> None:
        """Evaluates a checkpoint, unless it was evaluated before or cannot be read."""
        self._done_with.add(file_id)
        try:
            self._trainer.load_policy(steps)
        except UsageError as error:
            if not self._checkpoints.path(steps).exists():
                self.num_lost += 1
                self._show(f"checkpoint {steps:,}: was removed before it could be evaluated")
            elif isinstance(error, BrokenCheckpoint):
                self._show(f"checkpoint {steps:,}: {error}")
            else:
                raise
            return
        policy, known = self._policy_digest(), self._known.get(steps)
        if known is not None and known.policy == policy:
            return
        if self._was_evaluated_by_training():
            self._show(f"checkpoint {steps:,}: was evaluated by training")
            return
        self._check_training()
        result = self._evaluated(steps, policy)
        self._results.add(result)
        self._known[steps] = result
        self.num_evaluated += 1
        self._show(f"checkpoint {steps:,}: {result.evaluation.words()}")

    def _evaluated(self, steps: int, policy: str) -> EvaluationResult:
        clock, episodes = self._trainer.clock, self._episodes
        arguments = episodes.num_episodes, episodes.seed, False, clock.env_steps
        film = None
        if self._camera is None:
            evaluation = self._evaluator.evaluate(*arguments)
        else:
            root_dir, stem = self._trainer.directory.path, f"{self._results.name}-{steps:012d}"
            given = self._camera, root_dir, stem, self._num_filmed, "--video", self._captions
            with Recorder.into_run(*given) as recorder:
                evaluation = self._evaluator.evaluate(*arguments, recorder, self._captions)
            film = str(recorder.written[0][0].relative_to(root_dir))
        counters = clock.env_steps, clock.iterations, clock.updates, clock.wall_seconds
        return EvaluationResult(steps, *counters, policy, episodes, evaluation, film)

    def _policy_digest(self) -> str:
        """Returns a digest of the loaded weights and statistics."""
        digest = hashlib.sha256()
        for part in (self._trainer.algorithm, self._trainer.transforms):
            for name, value in nest.named_leaves(dict(part.state_dict()), "state"):
                is_tensor = isinstance(value, torch.Tensor)
                digest.update(f"{name} {(value.dtype, *value.shape) if is_tensor else value}\n".encode())
                if is_tensor:
                    digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _was_evaluated_by_training(self) -> bool:
        """Returns whether training has evaluated the loaded policy under the same name and on the same episodes."""
        end = time.monotonic() + SETTLE_SECONDS
        while self._of_training():
            if self._is_in_metrics():
                return True
            if time.monotonic() >= end:
                return False
            time.sleep(SETTLE_SECONDS / 10)
        return False

    def _is_in_metrics(self) -> bool:
        """Returns whether metrics.csv has an evaluation of the loaded policy with the same name and seeds."""
        clock = self._trainer.clock
        counters = [str(clock.env_steps), str(clock.iterations), str(clock.updates)]
        column = f"{self._results.name}/mean_return"
        content = contents.content(self._trainer.directory.path, "metrics.csv", contents.MAX_TABLE) or b""
        rows = csv.DictReader(io.StringIO(content.decode(errors="replace"), newline=""))
        found = [row for row in rows if row.get(column)]  # the last row may be incomplete
        found = [row for row in found if [row.get(name) for name in ("env_steps", "iterations", "updates")] == counters]
        return any(self._seeds(self._results.csv(int(row["steps"]))) == self._own_seeds for row in found)

    @property
    def _own_seeds(self) -> list[int]:
        return list(range(self._episodes.seed, self._episodes.seed + self._episodes.num_episodes))

    def _check_known(self) -> None:
        """Raises UsageError if earlier results with the same name come from other episodes."""
        for steps, result in self._known.items():
            if result.episodes != self._episodes:
                before, now = (dataclasses.asdict(one) for one in (result.episodes, self._episodes))
                name = next(name for name in now if before[name] != now[name])
                raise UsageError(
                    f"{self._results.csv(steps)} was evaluated with {name} {before[name]} instead of {now[name]}; give "
                    f"the results of this command another name, such as --name={self._results.name}2"
                )

    def _check_training(self) -> None:
        """Raises UsageError if training evaluates other episodes under the same name."""
        found = self._of_training()
        if found and self._seeds(found[-1]) not in (self._own_seeds, []):
            raise UsageError(
                f"{found[-1]} was written by training, which evaluates other episodes; give the results of this "
                f"command another name, such as --name={self._results.name}2"
            )

    def _of_training(self) -> list[Path]:
        """Returns the tables of evaluations that training wrote under the same name, in ascending order."""
        own = {self._results.csv(steps) for steps in self._known}
        pattern = f"eval/{self._results.name}-{12 * '[0-9]'}.csv"
        return sorted(set(self._trainer.directory.path.glob(pattern)) - own)

    def _seeds(self, path: Path) -> list[int]:
        """Returns the seeds of the episodes of an evaluation; empty if the file does not exist."""
        if (table := contents.table(self._trainer.directory.path, f"eval/{path.name}")) is None:
            return []
        header, rows = table
        if "seed" not in header:
            raise UsageError(f"{path} is not a table of episodes: it has no column seed; restore it, or remove it")
        return [int(one) for one in contents.clocks([row[header.index("seed")] for row in rows], path)]

    def _lock(self) -> Callable[[], Any]:
        files.make_directory(self._results.directory)
        path = self._results.directory / f"{self._results.name}.lock"
        with files.writing(path), files.open_own(path, "ab"):
            pass
        unlock = files.lock(path, self)
        if unlock is None:
            raise UsageError(
                f"{self._trainer.directory.path} is already being watched under the name {self._results.name!r}; "
                "choose another --name, or stop the other process"
            )
        return unlock


def in_words(environment: Environment) -> str:
    """Returns a description of name, constructor arguments, time limit and wrappers; equal for equal environments."""
    spec = environment.env_spec
    if spec is None:
        return environment.name
    kwargs = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}
    wrappers = [(one.entry_point, one.kwargs) for one in spec.additional_wrappers]
    return json.dumps([spec.id, spec.max_episode_steps, kwargs, wrappers], default=type_name, sort_keys=True)


def type_name(value: Any) -> Any:
    """Returns a JSON value for an object that JSON cannot express: an array as numbers, any other object as a name."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return getattr(value, "__qualname__", type(value).__qualname__)
