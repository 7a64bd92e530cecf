"""Comparison of an exported policy with the policy itself, on recorded observations."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alfish import nest
from alfish.compiler.numpy_program import compiled
from alfish.errors import RunError, UsageError
from alfish.exporting import numpy_file, torch_file
from alfish.exporting.graph import PolicyGraph, WithoutChecks
from alfish.exporting.recording import Step
from alfish.runs import random_state
from alfish.training.policy import Policy

Inputs = dict[str, np.ndarray]  # of one step, by name: leaves of the observation, `first`, `reward` and noise
Actions = list[np.ndarray]  # `[N, ...]` each, in the order of the action's leaves


def actions_of(policy: Policy, steps: Sequence[Step], sample: bool) -> Actions:
    """Returns the actions of `Policy.act`; step t draws from torch's generator after `manual_seed(t)`."""
    policy.reset()
    found = []
    with random_state.preserved(), WithoutChecks():
        for t, step in enumerate(steps):
            torch.manual_seed(t)
            action = policy.act(step.observation, sample=sample, first=step.first, reward=step.reward)
            found.append(nest.leaves(nest.map(np.asarray, action)))
    return [np.stack(column) for column in zip(*found)]


def inputs_of(program: PolicyGraph, steps: Sequence[Step]) -> list[Inputs]:
    """Returns the inputs of each step, with the random numbers that `actions_of` draws."""
    examples = {leaf.name: leaf.example.numpy() for leaf in program.inputs}
    found = []
    with random_state.preserved():
        for t, step in enumerate(steps):
            leaves = dict(nest.named_leaves(step.observation, "observation"))
            row = {name: np.asarray(leaf, examples[name].dtype) for name, leaf in leaves.items() if name in examples}
            row |= {"first": np.array(step.first), "reward": step.reward}
            torch.manual_seed(t)
            drawn = [(noise, noise.draw().numpy()) for noise in program.noise]
            row |= {noise.leaf.name: numbers for noise, numbers in drawn if noise.is_read}
            found.append(row)
    return found


def difference(found: Actions, expected: Actions) -> float:
    """Returns the largest absolute difference of two actions, relative to actions larger than 1."""
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(found, expected, strict=True)]
    largest = [(np.abs(a - b) / np.maximum(1, np.abs(b))).max(initial=0) for a, b in pairs]
    return float(np.max(largest))  # nan if one is, unlike `max`


def run_onnx(program: PolicyGraph, path: Path, inputs: Sequence[Inputs]) -> Actions:
    """Returns the actions of an ONNX file; onnxruntime computes them."""
    try:
        import onnxruntime
    except ImportError as error:
        raise UsageError("an .onnx file is checked with the extra 'onnx': pip install 'alfish[onnx]'") from error
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return _rolled_out(program, inputs, lambda row: session.run(None, {name: row[name] for name in names}))


def run_torch(program: PolicyGraph, path: Path, inputs: Sequence[Inputs]) -> Actions:
    """Returns the actions of a `.pt2` file."""
    module = torch_file.load(path)
    names = [leaf.name for leaf in (*program.inputs, *(noise.leaf for noise in program.read_noise))]

    def act(row: Inputs) -> list[np.ndarray]:
        results = module(*(torch.from_numpy(np.array(row[name])) for name in names))
        return [leaf.detach().numpy() for leaf in results]

    return _rolled_out(program, inputs, act)


def run_numpy(program: PolicyGraph, path: Path, inputs: Sequence[Inputs]) -> Actions:
    """Returns the actions of a numpy file, computed in a process without torch and alfish.

    Raises:
      RunError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="alfish-") as directory:
        given, found = Path(directory) / "inputs.npz", Path(directory) / "outputs.npz"
        np.savez(given, **{name: np.stack([row[name] for row in inputs]) for name in inputs[0]})  # type: ignore[arg-type]
        check = Path(__file__).with_name("numpy_check.py")
        command = [sys.executable, "-I", str(check), str(path.resolve()), str(given), str(found)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            words = ended.stderr.strip().splitlines() or [f"it ended with status {ended.returncode}"]
            raise RunError(f"the exported file fails without alfish: {words[-1]}")
        with np.load(found, allow_pickle=False) as outputs:
            return [outputs[f"action_{k}"] for k in range(len(program.actions))]


def run_numpy_here(program: PolicyGraph, inputs: Sequence[Inputs]) -> Actions:
    """Returns the actions of the numpy program inside this process, with the policy's own weights."""
    first, rest = compiled(numpy_file.translate(program))
    prepared = first(*(value.numpy() for value in program.constants.values()))
    names = [leaf.name for leaf in (*program.inputs, *(noise.leaf for noise in program.read_noise))]
    return _rolled_out(program, inputs, lambda row: rest(*prepared, *(row[name] for name in names)))


def _rolled_out(
    program: PolicyGraph, inputs: Sequence[Inputs], act: Callable[[Inputs], Sequence[Any]]
) -> list[np.ndarray]:
    """Returns the actions over all steps; `act` returns actions and next state."""
    state = {leaf.name: leaf.example.numpy() for leaf in program.state}
    found = []
    for row in inputs:
        results = act({**row, **state})
        count = len(program.actions)
        # Copies, because a program may write its results again in the next step.
        found.append([np.array(leaf) for leaf in results[:count]])
        state = dict(zip(state, (np.array(leaf) for leaf in results[count:])))
    return [np.stack(column) for column in zip(*found)]
