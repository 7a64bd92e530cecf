"""Export of a policy or a run. The file is kept only if it acts like the policy."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alfish.configuration.opening import load, open_run
from alfish.errors import RunError, UsageError
from alfish.exporting import numpy_file, onnx_file, torch_file, verification
from alfish.exporting.graph import PolicyGraph
from alfish.exporting.verification import Step, from_data, from_environment
from alfish.runs.packed.fetching import as_directory
from alfish.training.policy import Policy

LIMIT = 1e-5  # largest allowed difference from `Policy.act`; libraries round differently


class Exported(NamedTuple):
    """Result of an export.

    Attributes:
      files: written files.
      difference: largest difference of actions and next states from `Policy.act`, see `verification.difference`.
      from_program: largest difference of a numpy file's results from those of the same program inside alfish; None for
        other formats.
    """

    files: list[Path]
    difference: float
    from_program: float | None


class Format(NamedTuple):
    write: Callable[..., list[Path]]  # (program, path, text, noise_is_input)
    run: Callable[[PolicyGraph, Path, Sequence[verification.Inputs]], verification.Results]


FORMATS = {
    ".onnx": Format(onnx_file.write, verification.run_onnx),
    ".py": Format(numpy_file.write, verification.run_numpy),
    ".pt2": Format(torch_file.write, verification.run_torch),
}


def export(policy: Policy, output: Path, steps: Sequence[Step], sample: bool = False, origin: str = "") -> Exported:
    """Writes a policy in the format that the suffix of `output` names.

    Args:
      policy: policy on the CPU.
      output: path of the file, with a suffix in `FORMATS`. A numpy file needs an `.npz` file, written next to it.
      steps: steps on which the file and the policy are compared; differences may not exceed `LIMIT`.
      sample: whether the file samples actions, as training does; otherwise it uses the mode.
      origin: sentence that describes the policy, stored in the file.

    Raises:
      NotExportable: the format cannot express the policy; the message names the module.
      RunError: the file would act differently from the policy; it is not written.
    """
    form = FORMATS[output.suffix]
    program = PolicyGraph(policy, sample)
    text = json.dumps(description(program, origin)) if output.suffix == ".pt2" else origin
    with tempfile.TemporaryDirectory(prefix="alfish-") as directory:
        trial = Path(directory) / f"policy{output.suffix}"
        form.write(program, trial, text, True)
        expected = verification.results_of(policy, program, steps, sample)
        inputs = verification.inputs_of(program, steps, expected)
        found = form.run(program, trial, inputs)
    largest = verification.difference(found, expected)
    from_program = None
    if output.suffix == ".py":
        from_program = verification.difference(found, verification.run_numpy_here(program, inputs))
    if not largest <= LIMIT or from_program not in (None, 0.0):
        again = verification.results_of(policy, program, steps, sample)
        changes = not all(map(np.array_equal, expected, again))
        reason = "depends on a value that changes between calls" if changes else "enlarges rounding errors"
        raise RunError(
            f"the exported policy acts differently from the policy on {len(steps):,} observations, by up to "
            f"{max(largest, from_program or 0):.2g} (limit {LIMIT:g}), so {output} is not written; "
            f"the policy's step {reason}"
        )
    return Exported(form.write(program, output, text, False), largest, from_program)


def description(program: PolicyGraph, origin: str) -> dict[str, Any]:
    """Returns JSON values: the origin, the initial state, and name, shape and dtype of each input and output."""

    def shown(name: str, example: Any) -> dict[str, Any]:
        return {"name": name, "shape": list(example.shape), "dtype": str(example.dtype).removeprefix("torch.")}

    return {
        "origin": origin,
        "inputs": [shown(leaf.name, leaf.example) for leaf in program.inputs],
        "outputs": [
            *(shown(leaf.name, leaf.example) for leaf in program.actions),
            *(shown(f"next_{leaf.name}", leaf.example) for leaf in program.state),
        ],
        "initial_state": onnx_file.initial_state(program),
    }


def export_run(
    root_dir: str | Path,
    output: Path,
    checkpoint: str | int = "latest",
    sample: bool = False,
    num_steps: int = 1000,
    data: str | None = None,
    seed: int = 0,
    allow_import: Sequence[str] = (),
    policy: str | None = None,
) -> tuple[Exported, str]:
    """Writes the policy of a run, after comparing file and policy on observations of the environment or of data.

    Args:
      root_dir: directory of the run, or a packed run.
      output: path of the file; its suffix names the format: '.onnx', '.py' (numpy) or '.pt2' (torch).
      checkpoint: name of the checkpoint: 'latest', 'best', or its number of environment steps.
      sample: whether the file samples actions; otherwise it uses the mode.
      num_steps: number of observations on which the file is compared with the policy.
      data: source of recorded data for the comparison; None means that the environment of the run is used.
      seed: seed of the first episode in the environment.
      allow_import: modules that the run's configuration may import.
      policy: name of the policy, in a run with several policies; None means the only policy.

    Returns:
      The result, and a sentence that describes the exported policy.

    Raises:
      UsageError, RunError: `export` raises it; or the run cannot be opened, or its environment cannot be built.
    """
    with as_directory(root_dir) as directory:
        found = load(directory, checkpoint, allow_import=allow_import, policy=policy)
        steps = (
            _of_environment(directory, checkpoint, num_steps, seed, allow_import, policy)
            if data is None
            else from_data(data, found, num_steps)
        )
    origin = _origin(found, root_dir, sample, policy)
    return export(found, output, steps, sample, origin), origin


def _of_environment(
    directory: Path, checkpoint: str | int, num_steps: int, seed: int, allow_import: Sequence[str], policy: str | None
) -> list[Step]:
    try:
        with open_run(directory, allow_import=allow_import) as trainer:
            trainer.load_policy(checkpoint)
            return from_environment(trainer, num_steps, seed, policy)
    except UsageError as error:
        raise UsageError(f"{error}; to export without the environment, compare on recorded data with --data") from error


def _origin(policy: Policy, root_dir: str | Path, sample: bool, which: str | None) -> str:
    kind = f"{type(policy.algorithm).__name__} policy" + (f" {which}" if which else "")
    acts = "samples actions" if sample else "takes the mode of its actions"
    when = f"at {policy.env_steps:,} env steps" if policy.env_steps else "without environment steps"
    return f"{kind} of the run {Path(str(root_dir)).name} {when}; {acts}"
