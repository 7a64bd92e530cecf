"""Draws learning curves from `docs/results/*-curve.csv`, which `benchmarks.learning` writes.

  python -m benchmarks.pictures

Writes `docs/pictures/learning_curves.png`, for the README, one for each of several pages in `docs/algorithms/`, and
one of the targets of bins.
"""

import argparse
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from alfish.functional.return_distributions import Bins
from benchmarks import PROJECT, tables

DOCS = PROJECT / "docs"
PICTURES = DOCS / "pictures"


class Panel(NamedTuple):
    """A plot with one line for each seed.

    Attributes:
      title: above the plot.
      confs: file names in `docs/results/` without `-curve.csv`, and the words of each in the legend.
      level: of a dashed line, the goal of the conf or a return to compare with.
      clock: what the budget counts.
    """

    title: str
    confs: dict[str, str]
    level: float | None = None
    clock: str = "environment steps"


def of_conf(title: str, conf: str, level: float | None = None) -> Panel:
    return Panel(title, {conf: ""}, level)


def recorded(title: str, confs: dict[str, str], level: float | None = None) -> Panel:
    return Panel(title, confs, level, "updates")


DRAWN = {
    "learning_curves": [
        of_conf("CartPole-v1, PPO", "ppo_cartpole", 475),
        of_conf("LunarLander-v3, PPO", "ppo_lunarlander", 200),
        of_conf("HalfCheetah-v5, PPO", "ppo_halfcheetah", 3000),
    ],
    "ppo": [
        of_conf("LunarLander-v3", "ppo_lunarlander", 200),
        of_conf("HalfCheetah-v5", "ppo_halfcheetah", 3000),
        of_conf("Hopper-v5", "ppo_hopper", 2300),
    ],
    "a2c": [of_conf("CartPole-v1", "a2c_cartpole", 475)],
    "appo": [of_conf("CartPole-v1", "appo_cartpole", 475), of_conf("Recall", "appo_recall", 0.95)],
    "dqn": [
        of_conf("CartPole-v1", "dqn_cartpole", 475),
        of_conf("Acrobot-v1", "dqn_acrobot", -100),
        of_conf("LunarLander-v3", "dqn_lunarlander", 150),
    ],
    "distributional": [
        of_conf("CartPole-v1, QR-DQN", "qrdqn_cartpole", 490),
        of_conf("LunarLander-v3, Rainbow", "rainbow_lunarlander", 200),
        of_conf("Pendulum-v1, TQC", "tqc_pendulum", -155),
    ],
    "pqn": [of_conf("CartPole-v1", "pqn_cartpole", 490), of_conf("Acrobot-v1", "pqn_acrobot", -96)],
    "sac": [
        of_conf("Pendulum-v1", "sac_pendulum", -155),
        of_conf("MountainCarContinuous-v0", "sac_mountaincar_continuous", 90),
        of_conf("HalfCheetah-v5", "sac_halfcheetah", 4500),
    ],
    "recurrent_sac": [
        Panel("Recall, 4 cues", {"sac_recall-each-1000-steps": "with memory", "sac_recall-without-memory": "without"})
    ],
    "td3": [of_conf("HalfCheetah-v5", "td3_halfcheetah", 4500)],
    "recurrent_td3": [
        Panel("Recall, 2 cues", {"td3_recall-each-1000-steps": "with memory", "td3_recall-without-memory": "without"})
    ],
    "td3_bc": [
        recorded("Pendulum-v1, medium-replay", {"td3_bc_pendulum-medium-replay": ""}),
        recorded("HalfCheetah-v5, medium-replay", {"td3_bc_halfcheetah-medium-replay": ""}),
    ],
    "bc": [
        recorded(
            "Pendulum-v1", {"bc_pendulum-expert": "expert", "bc_pendulum-medium-replay": "medium-replay"}, level=-140.6
        ),
        recorded("HalfCheetah-v5, medium-replay", {"bc_halfcheetah-medium-replay": ""}),
    ],
    "iql": [
        recorded("Pendulum-v1, medium-replay", {"iql_pendulum-medium-replay": ""}),
        recorded("HalfCheetah-v5, medium-replay", {"iql_halfcheetah-medium-replay": ""}),
    ],
    "cql": [
        recorded(
            "Pendulum-v1, medium-replay",
            {"cql_pendulum-medium-replay": "CQL", "calql_pendulum-medium-replay": "Cal-QL, acts after 20 k updates"},
        )
    ],
    "dagger": [of_conf("Pendulum-v1", "dagger_pendulum", -141.3)],
    "distillation": [of_conf("HalfCheetah-v5 without velocities", "student_halfcheetah", 7321)],
    "apprenticeship": [of_conf("CartPole-v1", "appl_cartpole", 475)],
    "gail": [of_conf("HalfCheetah-v5", "gail_halfcheetah", 7321)],
    "guided_cost": [
        Panel(
            "LunarLander-v3",
            {"gcl_lunarlander": "guided cost learning", "gcl_lunarlander-gail": "GAIL"},
            200,
        )
    ],
    "reppo": [of_conf("HalfCheetah-v5", "reppo_halfcheetah", 4284)],
    "rnd": [Panel("MountainCar-v0", {"rnd_mountaincar": "PPO with RND", "rnd_mountaincar-ppo": "PPO"}, -180)],
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PICTURES.mkdir(exist_ok=True)
    for name, panels in DRAWN.items():
        figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), layout="constrained", squeeze=False)
        for axis, panel in zip(axes[0], panels):
            _draw(axis, panel)
        axes[0, 0].set_ylabel("mean return of 20 episodes")
        figure.savefig(PICTURES / f"{name}.png", dpi=110)
        plt.close(figure)
    _draw_targets()


def _draw_targets() -> None:
    """Draws the target of a return of 0.7 and of one beyond the last bin, with and without smoothing."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained", sharey=True)
    for axis, value in zip(axes, (0.7, 6.0)):
        for smoothing, shift in ((None, -0.2), (0.75, 0.2)):
            values = Bins(0.99, num_bins=11, low=-5.0, high=5.0, smoothing=smoothing)
            words = "divided between two bins" if smoothing is None else f"Bins.smoothing = {smoothing}"
            axis.bar(values.returns + shift, values.certain(torch.tensor(value)), 0.4, label=words)
        axis.axvline(value, color="grey", linewidth=0.8, linestyle="--")
        axis.set_title(f"a return of {value}", fontsize=11)
        axis.set_xlabel("return")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("probability")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(PICTURES / "bins.png", dpi=110)
    plt.close(figure)


def _draw(axis: Axes, panel: Panel) -> None:
    for number, (conf, words) in enumerate(panel.confs.items()):
        rows = tables.read_rows(DOCS / "results" / f"{conf}-curve.csv")
        for seed in dict.fromkeys(row["seed"] for row in rows):
            own = [row for row in rows if row["seed"] == seed]
            steps = [int(row["env_steps"]) / 1000 for row in own]
            line = axis.plot(steps, [float(row["mean"]) for row in own], linewidth=1.5, alpha=0.85)[0]
            if words:
                line.set(color=f"C{number}", label=words if seed == rows[0]["seed"] else None)
    if panel.level is not None:
        axis.axhline(panel.level, color="grey", linewidth=0.8, linestyle="--")
    if any(panel.confs.values()):
        axis.legend(frameon=False)
    axis.set_title(panel.title, fontsize=11)
    axis.set_xlabel(f"thousand {panel.clock}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


if __name__ == "__main__":
    main()
