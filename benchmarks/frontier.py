"""Return of learners on HalfCheetah against environment steps, and against CPU time.

  python -m benchmarks.frontier                              measures the costs that are missing, and draws
  python -m benchmarks.frontier --again                      measures all costs again; on an idle machine
  python -m benchmarks.frontier --confs=sac_halfcheetah      measures one conf
  python -m benchmarks.frontier --draw                       draws from what is there

The returns are those of `docs/results/CONF-curve.csv`, which `benchmarks.learning` writes; confs without a curve are
left out, and those without costs have a line over environment steps only. No record of a training has the seconds of
its processor. They are therefore computed:

  seconds of a run = seconds to start and compile + warm-up steps x seconds of one + other steps x seconds of one

`benchmarks.runs.alfish_costs` measures these three in a short run of the shipped conf, with the settings of its goal in
`benchmarks.learning`, on one thread, without evaluations. They are rows of `docs/results/frontier_costs.csv`, each
written when it is measured, so an interrupted measurement continues with the same command.

Writes `docs/pictures/frontier.png`, and the table of `docs/results.md` between its two comments.
"""

import argparse
import datetime
import math
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alfish.analysis import statistics
from benchmarks import PROJECT, learning, processes, tables

RESULTS = PROJECT / "docs" / "results"
COSTS = RESULTS / "frontier_costs.csv"
PICTURE = PROJECT / "docs" / "pictures" / "frontier.png"
PAGE = PROJECT / "docs" / "results.md"
TABLE = re.compile(r"(<!-- table of benchmarks\.frontier -->\n)(.*?)(<!-- end of the table -->)", re.DOTALL)
NUMBERS = ("warmup_env_steps", "start_seconds", "warmup_step_seconds", "step_seconds")
FIELDS = ("conf", *NUMBERS, "versions", "machine", "date")
TUNING_SEED = 100  # the first seed on which confs are tuned; it and later ones are not drawn
THRESHOLD = 4500.0  # the goal of SAC and TD3


@dataclass(frozen=True)
class Member:
    """A learner of the picture.

    Attributes:
      conf: shipped.
      label: in the legend.
      color, marker: of its line. The colours are those of Okabe and Ito and of Tol, which people who are colour-blind
        tell apart; markers repeat what colours say.
      on_policy: drawn as a dashed line.
    """

    conf: str
    label: str
    color: str
    marker: str
    on_policy: bool = False


MEMBERS = (
    Member("sac_halfcheetah", "SAC", "#000000", "o"),
    Member("td3_halfcheetah", "TD3", "#E69F00", "s"),
    Member("droq_halfcheetah", "DroQ", "#D55E00", "^"),
    Member("redq_halfcheetah", "REDQ", "#7F7F7F", "v"),
    Member("tqc_halfcheetah", "TQC", "#56B4E9", "D"),
    Member("crossq_halfcheetah", "CrossQ", "#0072B2", "P"),
    Member("xqc_halfcheetah", "XQC", "#009E73", "X"),
    Member("flashsac_halfcheetah", "FlashSAC", "#CC79A7", "*"),
    Member("flashsac_small_halfcheetah", "FlashSAC, small", "#882255", "p"),
    Member("reppo_halfcheetah", "REPPO", "#999933", "<", on_policy=True),
    Member("ppo_halfcheetah", "PPO", "#332288", ">", on_policy=True),
)


class Curve(NamedTuple):
    """Evaluations of the seeds that have the most of them; one that still trains is left out.

    Attributes:
      env_steps: `[N]`, mean over seeds.
      returns: `[S, N]`, for each seed.
    """

    env_steps: np.ndarray
    returns: np.ndarray


class Costs(NamedTuple):
    """CPU seconds."""

    warmup_env_steps: float
    start_seconds: float
    warmup_step_seconds: float
    step_seconds: float

    def seconds(self, env_steps: np.ndarray) -> np.ndarray:
        """Returns the seconds in which a run takes its first environment steps, `[N]` of `[N]`."""
        warmup = np.minimum(env_steps, self.warmup_env_steps)
        return self.start_seconds + warmup * self.warmup_step_seconds + (env_steps - warmup) * self.step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--confs", help="to measure; by default those that have a curve")
    parser.add_argument("--seconds", type=float, default=30.0, help="of CPU time, for each measurement")
    parser.add_argument("--again", action="store_true", help="measure also what has been measured")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    chosen = arguments.confs.split(",") if arguments.confs else []
    if unknown := set(chosen) - {member.conf for member in MEMBERS}:
        parser.error(f"no learner of the picture is called {', '.join(sorted(unknown))}")
    curves = {member.conf: found for member in MEMBERS if (found := curve(member.conf)) is not None}
    if not arguments.draw:
        present = {row["conf"] for row in tables.read_rows(COSTS)}
        for conf in chosen or curves:
            if arguments.again or conf not in present:
                publish(measure(conf, arguments.seconds))
    known = costs()
    for conf in curves.keys() - known.keys():
        print(f"{conf} has no line over CPU time: its costs have not been measured", file=sys.stderr)
    draw(curves, known, PICTURE)
    text = table(curves, known)
    page = PAGE.read_text()
    tables.write_text(PAGE, TABLE.sub(lambda found: found[1] + text + found[3], page))
    print(text)


def curve(conf: str) -> Curve | None:
    """Returns the published evaluations of a conf; None: there are none."""
    by_seed: dict[int, list[tuple[int, float]]] = {}
    for row in tables.read_rows(RESULTS / f"{conf}-curve.csv"):
        if int(row["seed"]) < TUNING_SEED:
            by_seed.setdefault(int(row["seed"]), []).append((int(row["env_steps"]), float(row["mean"])))
    if not by_seed:
        return None
    most = max(map(len, by_seed.values()))
    points = np.array([sorted(points) for points in by_seed.values() if len(points) == most])  # [S, N, 2]
    return Curve(points[..., 0].mean(0), points[..., 1])


def costs() -> dict[str, Costs]:
    """Returns the published costs, by conf."""
    return {row["conf"]: Costs(*(float(row[name]) for name in NUMBERS)) for row in tables.read_rows(COSTS)}


def measure(conf: str, seconds: float) -> dict[str, Any]:
    """Returns the row of a conf, by a short run in a process of its own on one thread, as its curve was made."""
    settings = next((goal.settings for goal in learning.GOALS if goal.name == conf), ())
    command = [sys.executable, "-m", "benchmarks.runs.alfish_costs", conf, f"--seconds={seconds}"]
    command += [f"--gin_param={one}" for one in settings]
    with tempfile.TemporaryDirectory() as cache:  # the start includes the compilation
        result = processes.run_script(command, processes.with_threads(1) | {"TORCHINDUCTOR_CACHE_DIR": cache})
    print(f"{conf}: {1000 * result['step_seconds']:.2f} ms for each step", flush=True)
    return {"conf": conf, **result, "machine": processes.machine(), "date": datetime.date.today().isoformat()}


def publish(row: dict[str, Any]) -> None:
    """Replaces the row of a conf."""
    order = [member.conf for member in MEMBERS]
    rounded = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in row.items()}
    tables.replace_rows(COSTS, [rounded], FIELDS, ["conf"], lambda each: order.index(each["conf"]))


def first_above(curve: Curve, threshold: float) -> float:
    """Returns the environment steps of the first evaluation whose mean over seeds reaches a threshold; inf: none."""
    reached = curve.env_steps[curve.returns.mean(0) >= threshold]
    return float(reached[0]) if len(reached) else math.inf


def table(curves: dict[str, Curve], costs: dict[str, Costs]) -> str:
    """Returns the Markdown table of the learners, in the order of the legend; cells of unknown costs are empty."""
    goal = f"to {THRESHOLD:,.0f}"
    headings = ["learner", "conf", "seeds", "env steps", "return", "CPU ms/step", "CPU seconds"]
    lines = [tables.header([*headings, f"env steps {goal}", f"CPU seconds {goal}"])]
    for member in MEMBERS:
        if (found := curves.get(member.conf)) is None:
            continue
        own, last = costs.get(member.conf), found.returns[:, -1]
        mean, interval = statistics.estimate(last[:, None], statistics.mean)
        reached = first_above(found, THRESHOLD)
        is_reached = math.isfinite(reached)
        # The whole run, and the part of it until the threshold.
        whole, part = (f"{own.seconds(np.array(x)):,.0f}" if own else "" for x in (found.env_steps[-1], reached))
        cells = [
            member.label,
            f"`{member.conf}`",
            len(last),
            f"{found.env_steps[-1]:,.0f}",
            f"{mean:,.0f}" if interval is None else f"{mean:,.0f} [{interval[0]:,.0f}, {interval[1]:,.0f}]",
            f"{1000 * own.step_seconds:.2f}" if own else "",
            whole,
            f"{reached:,.0f}" if is_reached else "not reached",
            part if is_reached else "",
        ]
        lines.append(tables.line(cells))
    return "\n".join(lines) + "\n"


def number(x: float) -> str:
    """Returns a number of an axis in few characters, such as `200 k`."""
    if x >= 1e6:
        return f"{x / 1e6:g} M"
    return f"{x / 1e3:g} k" if x >= 1e4 else f"{x:,.0f}"


def draw(curves: dict[str, Curve], costs: dict[str, Costs], path: Path) -> None:
    """Draws both panels, with one legend beside them; the right one lacks learners of unknown costs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for member in MEMBERS:
        if (found := curves.get(member.conf)) is None:
            continue
        xs = [found.env_steps]
        if member.conf in costs:
            xs.append(costs[member.conf].seconds(found.env_steps))
        count = len(found.returns)
        style = {"color": member.color, "marker": member.marker, "linestyle": "--" if member.on_policy else "-"}
        label = f"{member.label} ({count} seed{'s' * (count > 1)})"
        for axis, x in zip(axes, xs):
            axis.plot(x, found.returns.mean(0), **style, label=label, linewidth=1.6, markersize=5, markeredgewidth=0)
            if count > 1:
                low, high = statistics.band(found.returns, statistics.mean)
                axis.fill_between(x, low, high, color=member.color, alpha=0.12, linewidth=0)
    for axis, name in zip(axes, ("environment steps", "CPU seconds, one thread")):
        axis.set_xscale("log")
        axis.set_xlabel(name)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: number(x)))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("mean return of 20 episodes")
    figure.suptitle("HalfCheetah-v5", fontsize=12)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
