"""Workers on a Ray cluster of three nodes on this machine: rows per second, kills, and what they cost.

  python -m benchmarks.cluster speed                     # 1, 2, 4, 8 and 16 workers of a 2 ms environment
  python -m benchmarks.cluster speed --kill_period=10    # the same, with an actor killed every 10 s
  python -m benchmarks.cluster speed --kill_period=10 --spare_hosts=1   # the same, with an actor kept ready
  python -m benchmarks.cluster soak --seconds=600        # workers, actors and nodes die; every row is checked
  python -m benchmarks.cluster recovery --seconds=300    # seconds from a kill to the first new rows
  python -m benchmarks.cluster score --seconds=120       # APPO on CartPole under kills

`speed` trains APPO on CartPole with steps of 2 ms. Its efficiency is the rate over that of one worker times the
number of workers, if --workers begins with one. The results are appended to benchmarks/results/cluster.csv.
"""

import argparse
import datetime
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks import RESULTS, processes, tables
from benchmarks.ray_nodes import Nodes
from benchmarks.ray_runs import rate, score, soak

FIELDS = ("what", "workers", "value", "detail", "machine", "date")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "soak", "recovery", "score"))
    parser.add_argument("--seconds", type=float, help="of each measurement; default: soak 600, score 120, others 40")
    parser.add_argument("--workers", default="1,2,4,8,16", help="of speed")
    parser.add_argument("--kill_period", type=float, default=0.0, help="seconds between two kills of actors; 0: none")
    parser.add_argument("--spare_hosts", type=int, default=0, help="RayWorkers.spare_hosts, of speed and recovery")
    arguments = parser.parse_args()
    seconds = arguments.seconds or {"soak": 600.0, "score": 120.0}.get(arguments.what, 40.0)
    nodes = Nodes((4, 4, 4))
    common = {"machine": processes.machine(), "date": datetime.date.today().isoformat()}
    path = RESULTS / "cluster.csv"
    try:
        for row in _results(nodes, arguments.what, seconds, arguments):
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            tables.write_rows(path, [*tables.read_rows(path), row | common], FIELDS)
    finally:
        nodes.close()


def _results(nodes: Nodes, what: str, seconds: float, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    spares = f", {arguments.spare_hosts} spare" if arguments.spare_hosts else ""
    if what == "speed":
        one = 0.0  # worker's rate
        for count in map(int, arguments.workers.split(",")):
            steps, stats = rate(nodes, count, seconds, arguments.kill_period, arguments.spare_hosts)
            one = steps if count == 1 else one
            shares = stats["trainer_wait_fraction"], stats["worker_wait_fraction"]
            waits = f"trainer waits {shares[0]:.0%}, workers wait {shares[1]:.0%}"
            share = f"{steps / (one * count):.1%} of {count} x {one:.0f}; " if one else ""
            detail = f"{share}{waits}; {stats['restarts']:.0f} restarts"
            yield _row(f"speed, kill period {arguments.kill_period:g} s{spares}", count, steps, detail)
    elif what == "score":
        mean, env_steps, breaking = score(nodes, seconds)
        yield _row("return under kills", 4, mean, f"{env_steps:,} env steps; {breaking}")
    elif what == "soak":
        count, breaking = soak(nodes, seconds, log=lambda line: None)
        yield _row("rows checked under kills", 6, count, f"{seconds:g} s; {breaking}")
    else:
        for kind in ("worker", "actor", "raylet"):
            settings = {"settle": 45.0, "kinds": (kind,), "pause": (12.0, 15.0), "spare_hosts": arguments.spare_hosts}
            _, breaking = soak(nodes, seconds, log=lambda line: None, **settings)
            each = sorted(seconds for _, seconds in breaking.waits)
            detail = f"median of {len(each)}, {each[0]:.1f} to {each[-1]:.1f}; {breaking}"
            yield _row(f"seconds to new rows: {kind}{spares}", 6, statistics.median(each), detail)


def _row(what: str, workers: int, value: float, detail: str) -> dict[str, Any]:
    return {"what": what, "workers": workers, "value": round(value, 3), "detail": detail}


if __name__ == "__main__":
    main()
