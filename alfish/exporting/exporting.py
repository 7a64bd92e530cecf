"""Export of a policy: written, compared with the policy itself, and kept only if they act alike."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alfish.errors import RunError
from alfish.exporting import comparison, numpy_file, onnx_file, torch_file
from alfish.exporting.graph import PolicyGraph
from alfish.exporting.recording import Step
from alfish.training.policy import Policy

LIMIT = 1e-5  # of the difference from `Policy.act`: libraries round products and exponentials in their own ways


class Exported(NamedTuple):
    """Result of an export.

    Attributes:
      files: that were written.
      difference: the largest one of an action or a next state from `Policy.act`, see `comparison.difference`.
      from_program: the largest one of a numpy file from the same program inside alfish; None for other formats.
    """

    files: list[Path]
    difference: float
    from_program: float | None


class Format(NamedTuple):
    write: Callable[..., list[Path]]  # (program, path, text, noise_is_input)
    run: Callable[[PolicyGraph, Path, Sequence[comparison.Inputs]], comparison.Results]


FORMATS = {
    ".onnx": Format(onnx_file.write, comparison.run_onnx),
    ".py": Format(numpy_file.write, comparison.run_numpy),
    ".pt2": Format(torch_file.write, comparison.run_torch),
}


def export(policy: Policy, output: Path, steps: Sequence[Step], sample: bool = False, origin: str = "") -> Exported:
    """Writes a policy in the format that the suffix of `output` names.

    Args:
      policy: on the CPU.
      output: the file; a numpy file has an `.npz` beside it.
      steps: on which the file and the policy must act alike.
      sample: the file samples actions as in training; else it takes their mode.
      origin: sentence on what the policy is, stored in the file.

    Raises:
      NotExportable: the format cannot express the policy; names the module.
      RunError: the file would act differently; it is not written.
    """
    form = FORMATS[output.suffix]
    program = PolicyGraph(policy, sample)
    text = json.dumps(description(program, origin)) if output.suffix == ".pt2" else origin
    with tempfile.TemporaryDirectory(prefix="alfish-") as directory:
        trial = Path(directory) / f"policy{output.suffix}"
        form.write(program, trial, text, True)
        expected = comparison.results_of(policy, program, steps, sample)
        inputs = comparison.inputs_of(program, steps, expected)
        found = form.run(program, trial, inputs)
    largest = comparison.difference(found, expected)
    from_program = None
    if output.suffix == ".py":
        from_program = comparison.difference(found, comparison.run_numpy_here(program, inputs))
    if not largest <= LIMIT or from_program not in (None, 0.0):
        again = comparison.results_of(policy, program, steps, sample)
        changes = not all(map(np.array_equal, expected, again))
        reason = "depends on a value that changes from call to call" if changes else "enlarges rounding errors"
        raise RunError(
            f"the exported policy acts differently from the policy on {len(steps):,} observations, by up to "
            f"{max(largest, from_program or 0):.2g} (limit {LIMIT:g}), so {output} is not written; its step {reason}"
        )
    return Exported(form.write(program, output, text, False), largest, from_program)


def description(program: PolicyGraph, origin: str) -> dict[str, Any]:
    """Returns the names, shapes and dtypes of inputs and outputs, in order, as JSON values."""

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
