"""The configuration that the runs of a group share, and the copy of it in the group's directory.

Runs are trained from the copy, so that gin files may be edited in the meantime.
"""

import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alfish.analysis.run_source import EVALUATION
from alfish.configuration import reading
from alfish.configuration.opening import process_preserved
from alfish.configuration.runs import configured_run
from alfish.environments.finding import resolved
from alfish.errors import UsageError
from alfish.parameters import differences
from alfish.parameters.description import CONFIG_FILE
from alfish.runs import contents, trust
from alfish.runs.files import make_directory, write_atomically
from alfish.training.clock import Budget
from alfish.training.listeners import Evaluate

BASE = "base"  # directory in a group's directory with the common configuration


class Base(NamedTuple):
    """A configuration of runs, and properties of the first run.

    Attributes:
      text: configuration in gin's normal form.
      operative_text: configuration with the values of all used parameters, including defaults.
      seed: value of `Trainer.seed`.
      budget: budget of each run.
      iteration_steps: number of clock steps of one iteration.
      evaluation_period: number of clock steps between evaluations; 0 means only an evaluation at the end.
    """

    text: str
    operative_text: str
    seed: int
    budget: Budget
    iteration_steps: int
    evaluation_period: int

    @classmethod
    def read(cls, gin_files: Sequence[str], bindings: Sequence[str], variants: Iterable[Sequence[str]]) -> "Base":
        """Reads a configuration, checks it with the bindings of each variant, and builds a trainer of the first
        variant.

        Args:
          gin_files, bindings: gin files and bindings, as for `reading.read`.
          variants: bindings by which runs will differ, such as `PPO.gamma=0.98`; at least one variant.

        Raises:
          UsageError: as for `configured_run`; or the runs would not be evaluated.
        """
        variants = list(variants)
        with reading.preserved(), process_preserved():
            for variant in variants:
                reading.read(gin_files, [*bindings, *variant])
                _check_environment()
            # Built on the CPU, because this process would otherwise occupy GPU memory permanently.
            built = [*bindings, *variants[0], "Trainer.device='cpu'"]
            with (
                tempfile.TemporaryDirectory(prefix="alfish-") as nowhere,  # a new directory without a run
                configured_run(Path(nowhere) / BASE, gin_files, built, makes_directory=False) as trainer,
            ):
                trainer.close()
            evaluations = [listener for listener in trainer.listeners if isinstance(listener, Evaluate)]
            periods = {listener.name: listener.period for listener in evaluations}
            if EVALUATION not in periods:
                raise UsageError(
                    f"the runs could not be compared: Trainer.listeners has no @Evaluate() with the name {EVALUATION!r}"
                )
            operative_text = trainer.directory.config[reading.OPERATIVE_FILE]
            reading.read(gin_files, bindings)
            steps = math.ceil(trainer.unroller.unroll_length * trainer.unroller.num_envs)
            return cls(reading.text(), operative_text, trainer.seed, trainer.clock.budget, steps, periods[EVALUATION])

    @classmethod
    def read_copy(cls, directory: Path, variants: Iterable[Sequence[str]], allow_import: Sequence[str]) -> "Base":
        """Reads the copy in a group's directory, which may come from another person.

        Raises:
          UsageError: as for `read`; or the copy imports modules that are neither alfish's nor in `allow_import`.
        """
        copy = directory / BASE / CONFIG_FILE
        with trust.restricted(copy, allow_import):
            return cls.read([str(copy)], [], variants)

    def write(self, directory: Path) -> None:
        """Writes the copy into the directory of a group of runs."""
        make_directory(directory / BASE)
        write_atomically(directory / BASE / reading.OPERATIVE_FILE, self.operative_text)
        write_atomically(directory / BASE / CONFIG_FILE, self.text)
        trust.record(self.text)

    def difference(self, directory: Path) -> str:
        """Returns the lines that differ between the copy in a directory and this text, with budgets; '' if none."""
        return differences.difference(contents.text(directory / BASE, CONFIG_FILE) or "", self.text, with_budget=True)


def _check_environment() -> None:
    """Raises UsageError if the environment that the configuration names does not exist."""
    bound: dict[str, Any] = {"env_kwargs": None, "vectorization": "sync"}
    bound |= reading.bound("make_environment", "env_id", "env_kwargs", "vectorization")
    if isinstance(env_id := bound.get("env_id"), str) and bound["vectorization"] != "envpool":
        resolved(env_id, bound["env_kwargs"] or {})
