"""Export of the policy of a run."""

from collections.abc import Sequence
from pathlib import Path

from alfish.archives.opening import as_directory
from alfish.configuration.opening import load, open_run
from alfish.errors import UsageError
from alfish.exporting.exporting import Exported, export
from alfish.exporting.recording import Step, from_data, from_environment
from alfish.training.policy import Policy


def export_run(
    root_dir: str | Path,
    output: Path,
    checkpoint: str | int = "latest",
    sample: bool = False,
    num_steps: int = 1000,
    data: str | None = None,
    seed: int = 0,
    allow_import: Sequence[str] = (),
) -> tuple[Exported, str]:
    """Writes the policy of a run, compared on observations of its environment or of recorded data.

    Args:
      root_dir: of the run, or a packed run.
      output: the file; its suffix names the format.
      checkpoint: 'latest', 'best' or steps.
      sample: the file samples actions; else it takes their mode.
      num_steps: number of observations to compare on.
      data: source of recorded data; None: the environment of the run.
      seed: of the first episode in the environment.
      allow_import: modules that the run's configuration may import.

    Returns:
      The result, and a sentence on what was exported.

    Raises:
      UsageError, RunError: see `exporting.export`; or the environment cannot be built.
    """
    with as_directory(root_dir) as directory:
        policy = load(directory, checkpoint, allow_import=allow_import)
        steps = (
            _of_environment(directory, checkpoint, num_steps, seed, allow_import)
            if data is None
            else from_data(data, policy, num_steps)
        )
    origin = _origin(policy, root_dir, sample)
    return export(policy, output, steps, sample, origin), origin


def _of_environment(
    directory: Path, checkpoint: str | int, num_steps: int, seed: int, allow_import: Sequence[str]
) -> list[Step]:
    try:
        with open_run(directory, allow_import=allow_import) as trainer:
            trainer.load_policy(checkpoint)
            return from_environment(trainer, num_steps, seed)
    except UsageError as error:
        raise UsageError(f"{error}; without the environment, compare on recorded data with --data") from error


def _origin(policy: Policy, root_dir: str | Path, sample: bool) -> str:
    name = Path(str(root_dir)).name
    acts = "samples actions" if sample else "takes the mode of its actions"
    return f"{type(policy.algorithm).__name__} policy of the run {name} at {policy.env_steps:,} env steps; {acts}"
