"""Steps per second of whole iterations of PPO on CartPole: alfish's ways, JAX, rlox and EnvPool in turns.

  python -m benchmarks.iteration                                    all sizes: 15 minutes
  python -m benchmarks.iteration --num_envs=1024 --layers=64        some sizes
  python -m benchmarks.iteration --sides=numpy-1,compiled-2         some sides
  python -m benchmarks.iteration --device=cuda --num_envs=4096,65536 --sides=compiled-1,jax-2    on a GPU
  python -m benchmarks.iteration --table                            only the tables, from existing rows

An iteration is an unroll of 16 steps, metrics, advantages, and one epoch of four minibatches. Each side is a process of
its own, and trains for some seconds when its turn comes, after all graphs are compiled. The other sides wait meanwhile.

- numpy: gymnasium's CartPole, joint steps in numpy, a compiled update;
- envpool: EnvPool's CartPole, a compiled update;
- tensors: `alfish/CartPole-v1` with `SyncUnroller`, a compiled update;
- compiled: `alfish/CartPole-v1` with `CompiledUnroller`, a compiled preparation of the unroll and a compiled update;
- jax, gymnax: PPO as one compiled function in the manner of PureJaxRL, with CartPole's equations, and with gymnax's;
- rlox: its PPO with its CartPole in Rust;
- envpool_stepping: EnvPool's CartPole with random actions, without a policy.

A number behind a side is its number of threads; JAX uses all cores. Steps are rows that train. Processor time counts
beside wall time, because other programs may use the machine. Writes `docs/results/iteration.csv`, a row for each turn,
and prints the tables of docs/results.md.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

from benchmarks import PROJECT, processes, tables
from benchmarks.runs.turns import READY

CSV = PROJECT / "docs" / "results" / "iteration.csv"
KEY = ("side", "num_envs", "length", "layers", "device", "round")
FIELDS = (*KEY, "steps_per_second", "steps_per_cpu_second", "versions", "machine")
LENGTH = 16  # vector steps of an unroll
ROUNDS, SECONDS = 5, 2.0  # number of rounds, and seconds of each side in a round
OWN = ("numpy-1", "envpool-1", "tensors-1", "compiled-1", "compiled-2")
PEERS = ("jax-2", "gymnax-2", "rlox-1", "rlox-2", "envpool_stepping-1", "envpool_stepping-2")
BASELINE = "compiled-2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_envs", default="1024,4096")
    parser.add_argument("--layers", default="32,64", help="sizes of the two layers of policy and value")
    parser.add_argument("--sides", default=",".join((*OWN, *PEERS)))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        for num_envs in map(int, arguments.num_envs.split(",")):
            for layers in map(int, arguments.layers.split(",")):
                measure(arguments.sides.split(","), num_envs, layers, arguments.device)
    rows = tables.read_rows(CSV)
    own, peers = (table(rows, sides, arguments.device) for sides in (OWN, (*PEERS, BASELINE)))
    print(f"{own}\n\n{peers}")


def measure(sides: Sequence[str], num_envs: int, layers: int, device: str = "cpu") -> None:
    """Measures all sides in turns, and writes their rows."""
    with contextlib.ExitStack() as stack:
        take_turn = {side: stack.enter_context(_Side(side, num_envs, layers, device)) for side in sides}
        rows = []
        for number in range(ROUNDS):
            for side, take in take_turn.items():
                result = take(SECONDS)
                rows.append(
                    {
                        **dict(zip(KEY, (side, num_envs, LENGTH, layers, device, number))),
                        "steps_per_second": round(result["steps"] / result["seconds"]),
                        "steps_per_cpu_second": round(result["steps"] / result["cpu_seconds"]),
                        "versions": take.versions,
                        "machine": processes.machine(),
                    }
                )
    tables.replace_rows(CSV, rows, FIELDS, KEY)


class _Side:
    """A waiting process, which trains for some seconds when it is called.

    Attributes:
      versions: names of the packages that the side uses, with versions.
    """

    def __init__(self, side: str, num_envs: int, layers: int, device: str = "cpu"):
        name, threads = side.split("-")
        sizes = [str(number) for number in (num_envs, LENGTH, layers)]
        python, script, arguments = _script(name, device)
        command = [python, str(PROJECT / "benchmarks" / "runs" / f"{script}_iteration_run.py"), *arguments, *sizes]
        self._process = subprocess.Popen(
            [*command, threads] if script != "jax" else command,
            env=processes.with_threads(int(threads)) | {"JAX_PLATFORMS": device},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions = self._line(lambda line: line.startswith(READY)).removeprefix(READY).strip()

    def __call__(self, seconds: float) -> dict[str, float]:
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        return dict(json.loads(self._line(lambda line: line.startswith("{"))))

    def _line(self, is_wanted: Callable[[str], bool]) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if is_wanted(line):
                return line
        raise SystemExit(f"{' '.join(map(str, self._process.args))} ended early")  # type: ignore[arg-type]

    def __enter__(self) -> "_Side":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()  # closes the pipes


def _script(name: str, device: str) -> tuple[str, str, list[str]]:
    """Returns the Python of a side, the name of its script, and the first arguments."""
    if name in ("jax", "gymnax"):
        return processes.peer_python("jax"), "jax", [name]
    if name == "rlox":
        return processes.peer_python("rlox"), "rlox", []
    return sys.executable, "alfish", [name, device]


def table(rows: Sequence[dict[str, str]], sides: Sequence[str], device: str = "cpu") -> str:
    """Returns a Markdown table: medians of steps per second, and in brackets of steps per second of the processor."""
    lines = [tables.header(["environments", "layers", *sides])]
    rows = [row for row in rows if row["device"] == device]
    for num_envs, layers in sorted({(int(row["num_envs"]), int(row["layers"])) for row in rows}):
        cells = []
        for side in sides:
            own = [
                row
                for row in rows
                if (row["side"], row["num_envs"], row["layers"]) == (side, str(num_envs), str(layers))
            ]
            wall, cpu = (
                statistics.median(float(row[field]) for row in own) if own else None
                for field in ("steps_per_second", "steps_per_cpu_second")
            )
            cells.append(f"{wall:,.0f} ({cpu:,.0f})" if wall is not None and cpu is not None else "")
        lines.append(tables.line([f"{num_envs:,}", f"2 x {layers}", *cells]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
