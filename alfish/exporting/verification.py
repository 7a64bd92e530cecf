"""Comparison of an exported file with its policy, on recorded observations.

Before each step, the file receives the policy's own state. Otherwise a policy that reads its last action could
accumulate rounding errors until the comparison is meaningless.
"""

import contextlib
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from alfish import nest
from alfish.compiler.numpy_program import compiled
from alfish.errors import RunError, UsageError
from alfish.exporting import numpy_file, torch_file
from alfish.exporting.graph import PolicyGraph, WithoutChecks
from alfish.nest import Nest
from alfish.offline import Episode, SourceReading, Spaces
from alfish.runs import random_state
from alfish.training.policy import Policy
from alfish.training.trainer import Trainer

LEAST_LENGTH = 100  # least number of steps for each agent of a game before the game is cut off
NUM_EPISODES = 8  # episodes per block; environments without individual seeds run all episodes at once


class Step(NamedTuple):
    """The input of a policy before it acts."""

    observation: Nest  # observation in the units and structure of the environment
    first: bool  # whether it is the first observation of an episode
    reward: np.ndarray  # reward of the previous action; zeros at the first observation


def from_environment(trainer: Trainer, num_steps: int, seed: int, policy: str | None = None) -> list[Step]:
    """Returns the steps of episodes in which the trainer's policy acts by its mode.

    Args:
      trainer: trainer with the policy's weights.
      num_steps: number of steps.
      seed: seed of the first episode.
      policy: name of the policy, in a run with several policies; None means the only policy.
    """
    options: dict[str, Any] = {} if policy is None else {"policy": policy}
    with contextlib.closing(trainer.evaluator(NUM_EPISODES, 1, num_steps)) as evaluator:
        # Agents that take turns or join late act in only some of a game's steps, so its length limit is raised.
        if groups := getattr(evaluator.environment, "groups", None):
            evaluator.max_length = max(num_steps, LEAST_LENGTH) * sum(len(group.agents) for group in groups.values())
        evaluator.log = lambda line: None  # hides lines about episodes that were cut off, which do not matter here
        seeds = itertools.count(seed, NUM_EPISODES)
        blocks = (evaluator.test_episodes(NUM_EPISODES, first, **options) for first in seeds)
        return _steps(itertools.chain.from_iterable(blocks), num_steps)


def from_data(source: str, policy: Policy, num_steps: int) -> list[Step]:
    """Returns the first steps of recorded data.

    Args:
      source: source of recorded data, as in `OfflineBuffer.sources`.
      policy: policy whose spaces the data must fit.
      num_steps: number of steps.

    Raises:
      UsageError: the data cannot be read, do not fit, or have too few steps.
    """
    reading = SourceReading([source], Spaces(policy.observation_space, policy.action_space))
    steps = _steps(iter(reading), num_steps)
    if len(steps) < num_steps:
        raise UsageError(f"{source} has {len(steps):,} steps, but {num_steps:,} were requested (--num_steps)")
    return steps


def _steps(episodes: Iterable[Episode], num_steps: int) -> list[Step]:
    return list(itertools.islice(itertools.chain.from_iterable(map(_of_episode, episodes)), num_steps))


def _of_episode(episode: Episode) -> Iterator[Step]:
    for t in range(episode.length):
        reward: Any = episode.rewards[t - 1] if t else np.zeros_like(episode.rewards[0])
        yield Step(nest.map(lambda leaf, t=t: leaf[t], episode.observations), t == 0, np.asarray(reward, np.float32))


Inputs = dict[str, np.ndarray]  # inputs of one step by name: observation leaves, `first`, `reward`, state and noise
Results = list[np.ndarray]  # arrays `[N, ...]`: leaves of the action, then leaves of the program's next state


def results_of(policy: Policy, program: PolicyGraph, steps: Sequence[Step], sample: bool) -> Results:
    """Returns the results of `Policy.act`. Before step t, torch's generator is seeded with t."""
    policy.reset()
    carried = [leaf.name for leaf in program.state]
    found = []
    with random_state.preserved(), WithoutChecks():
        for t, step in enumerate(steps):
            torch.manual_seed(t)
            action = policy.act(step.observation, sample=sample, first=step.first, reward=step.reward)
            after = dict(nest.named_leaves(policy.state, "state"))
            # Leaves are copied, because the policy may overwrite its state in the next step.
            found.append([np.array(leaf) for leaf in (*nest.leaves(action), *(after[name][0] for name in carried))])
    return [np.stack(column) for column in zip(*found)]


def inputs_of(program: PolicyGraph, steps: Sequence[Step], results: Results) -> list[Inputs]:
    """Returns the inputs of each step, with the states and the random numbers of `results_of`."""
    examples = {leaf.name: leaf.example.numpy() for leaf in program.inputs}
    states = {leaf.name: leaf.example.numpy() for leaf in program.state}
    found = []
    with random_state.preserved():
        for t, step in enumerate(steps):
            leaves = dict(nest.named_leaves(step.observation, "observation"))
            row = {name: np.asarray(leaf, examples[name].dtype) for name, leaf in leaves.items() if name in examples}
            row |= {"first": np.array(step.first), "reward": step.reward, **states}
            states = dict(zip(states, (np.array(column[t]) for column in results[len(program.actions) :])))
            torch.manual_seed(t)
            drawn = [(noise, noise.draw().numpy()) for noise in program.noise]
            row |= {noise.leaf.name: numbers for noise, numbers in drawn if noise.is_read}
            found.append(row)
    return found


def difference(found: Results, expected: Results) -> float:
    """Returns the largest difference, relative to the expected value if its absolute value exceeds 1."""
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(found, expected, strict=True)]
    largest = [(np.abs(a - b) / np.maximum(1, np.abs(b))).max(initial=0) for a, b in pairs]
    return float(np.max(largest))  # nan if an entry is nan, unlike `max`


def run_onnx(program: PolicyGraph, path: Path, inputs: Sequence[Inputs]) -> Results:
    """Runs an ONNX file with onnxruntime and returns its results."""
    try:
        import onnxruntime
    except ImportError as error:
        raise UsageError("an .onnx file is checked with the extra 'onnx': pip install 'alfish[onnx]'") from error
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return _stacked(inputs, lambda row: session.run(None, {name: row[name] for name in names}))


def run_torch(program: PolicyGraph, path: Path, inputs: Sequence[Inputs]) -> Results:
    """Returns the results of a `.pt2` file."""
    module = torch_file.load(path)
    names = [leaf.name for leaf in (*program.inputs, *(noise.leaf for noise in program.read_noise))]

    def act(row: Inputs) -> list[np.ndarray]:
        results = module(*(torch.from_numpy(np.array(row[name])) for name in names))
        return [leaf.detach().numpy() for leaf in results]

    return _stacked(inputs, act)


def run_numpy(program: PolicyGraph, path: Path, inputs: Sequence[Inputs]) -> Results:
    """Returns the results of a numpy file, computed in a process without torch and alfish.

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
            return [outputs[f"result_{k}"] for k in range(len(program.results))]


def run_numpy_here(program: PolicyGraph, inputs: Sequence[Inputs]) -> Results:
    """Returns the results of the numpy program inside this process, with the policy's own weights."""
    first, rest = compiled(numpy_file.translate(program))
    prepared = first(*(value.numpy() for value in program.constants.values()))
    names = [leaf.name for leaf in (*program.inputs, *(noise.leaf for noise in program.read_noise))]
    return _stacked(inputs, lambda row: rest(*prepared, *(row[name] for name in names)))


def _stacked(inputs: Sequence[Inputs], act: Callable[[Inputs], Sequence[Any]]) -> Results:
    """Returns the results of all steps; `act` returns the leaves of the action and of the next state."""
    # Leaves are copied, because a program may overwrite its results in the next step.
    found = [[np.array(leaf) for leaf in act(row)] for row in inputs]
    return [np.stack(column) for column in zip(*found)]
