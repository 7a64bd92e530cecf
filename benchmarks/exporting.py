"""Exported policies of the shipped confs: largest difference from the policy, and microseconds an action.

    python -m benchmarks.exporting                # all confs; about ten minutes
    python -m benchmarks.exporting sac_pendulum   # some of them
    python -m benchmarks.exporting --table        # prints the table of what was measured

Each conf trains for as long as `benchmarks.fingerprints` trains it, with its own networks. Its policy is exported to
each format, and compared on 1000 observations of its environment. Times are of one observation and one thread: the
median of ten blocks of 200 calls of `Policy.act`, and of the file with its own runtime. Rows go to
docs/results/exporting.csv. The machine must be idle.
"""

import argparse
import contextlib
import importlib.util
import io
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import alfish
from alfish.configuration.locating import confs_directory
from alfish.configuration.opening import open_run
from alfish.exporting import torch_file, verification
from alfish.exporting.exporting import FORMATS, export
from alfish.exporting.graph import PolicyGraph
from alfish.exporting.verification import Step, from_environment
from benchmarks import PROJECT, tables
from benchmarks.fingerprints import settings
from benchmarks.timing import seconds_a_call

PATH = PROJECT / "docs" / "results" / "exporting.csv"
FIELDS = ("conf", "format", "sample", "num_steps", "difference", "microseconds", "act_microseconds")
NUM_STEPS, NUM_BLOCKS, NUM_CALLS = 1000, 10, 200


def measure(conf: str) -> list[dict[str, Any]]:
    """Trains a conf for a short time, exports its policy and returns a row for each format."""
    path = confs_directory() / f"{conf}.gin"
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
        root_dir = Path(directory) / "run"
        alfish.train(conf=str(path), root_dir=root_dir, **settings(path, Path(directory)))
        policy = alfish.load(root_dir)
        with open_run(root_dir) as trainer:
            trainer.load_policy()
            steps = from_environment(trainer, NUM_STEPS, seed=0)
        rows = []
        for suffix in FORMATS:
            file = Path(directory) / f"policy{suffix}"
            exported = export(policy, file, steps)
            policy.reset()
            act = _microseconds(lambda step: policy.act(step.observation, first=step.first, reward=step.reward), steps)
            rows.append({
                "conf": conf, "format": suffix, "sample": False, "num_steps": len(steps),
                "difference": exported.difference, "microseconds": round(_of_file(file, policy, steps), 1),
                "act_microseconds": round(act, 1),
            })  # fmt: skip
            sampled = export(policy, file, steps, sample=True)
            rows.append({
                "conf": conf, "format": suffix, "sample": True, "num_steps": len(steps),
                "difference": sampled.difference,
            })  # fmt: skip
        return rows


def _of_file(file: Path, policy: Any, steps: Sequence[Step]) -> float:
    """Returns the microseconds of a call of an exported file, its memory handed on from call to call."""
    if file.suffix == ".py":
        spec = importlib.util.spec_from_file_location("policy", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made = module.Policy()
        return _microseconds(lambda step: made.act(step.observation, bool(step.first), step.reward), steps)
    program = PolicyGraph(policy)
    inputs = verification.inputs_of(program, steps, verification.results_of(policy, program, steps, sample=False))
    state = {leaf.name: leaf.example.numpy() for leaf in program.state}
    call: Callable[[dict[str, Any]], Sequence[Any]]
    if file.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

        def call(row: dict[str, Any]) -> Sequence[Any]:
            return session.run(None, row)

    else:
        loaded = torch_file.load(file)

        def call(row: dict[str, Any]) -> Sequence[Any]:
            with torch.no_grad():
                return loaded(*row.values())

    convert = torch.from_numpy if file.suffix == ".pt2" else np.asarray
    names = [leaf.name for leaf in program.inputs]
    rows = [{name: convert(np.array(row[name])) for name in names if name in row} for row in inputs]
    carried = {name: convert(value) for name, value in state.items()}

    def act(row: dict[str, Any]) -> None:
        given = row | carried
        results = call({name: given[name] for name in names})
        carried.update(zip(carried, results[len(program.actions) :]))

    return _microseconds(act, rows)


def _microseconds(call: Callable[[Any], Any], rows: Sequence[Any]) -> float:
    blocks = []
    for block in range(NUM_BLOCKS + 1):  # the first one warms up
        first = block * NUM_CALLS
        blocks.append(1e6 * seconds_a_call(lambda k: call(rows[k % len(rows)]), NUM_CALLS, first))
    return statistics.median(blocks[1:])


def table() -> str:
    """Returns the table of the results page: a row for each conf."""
    rows = tables.read_rows(PATH)
    columns = ["conf", "numpy", "ONNX", "torch.export", "policy.act, us", "numpy, us", "ONNX, us", "torch.export, us"]
    lines = [tables.header(columns)]
    for conf in sorted({row["conf"] for row in rows}):
        own = {row["format"]: row for row in rows if row["conf"] == conf and row["sample"] == "False"}
        order = [own[suffix] for suffix in (".py", ".onnx", ".pt2")]
        worst = {
            suffix: max(float(row["difference"]) for row in rows if (row["conf"], row["format"]) == (conf, suffix))
            for suffix in own
        }
        act = statistics.median(float(row["act_microseconds"]) for row in order)
        times = [f"{float(row['microseconds']):.0f}" for row in order]
        lines.append(tables.line([conf, *(f"{worst[row['format']]:.1g}" for row in order), f"{act:.0f}", *times]))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("confs", nargs="*", help="shipped confs by name; none: all that train a task")
    parser.add_argument("--table", action="store_true", help="print the table, and measure nothing")
    given = parser.parse_args(arguments)
    if not given.table:
        from alfish.bin.confs import read

        torch.set_num_threads(1)
        shipped = sorted(path.stem for path in confs_directory().glob("*.gin") if read(path).task)
        for conf in given.confs or shipped:
            tables.replace_rows(PATH, measure(conf), FIELDS, ("conf", "format", "sample"))
            print(conf, flush=True)
    print(table())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
