"""Draws the README's learning curves from `docs/results/*-curve.csv`, which `benchmarks.learning` writes.

  python -m benchmarks.pictures

Writes `docs/pictures/learning_curves.png`.
"""

import argparse

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import PROJECT, tables

DOCS = PROJECT / "docs"
SHOWN = {
    "ppo_cartpole": ("CartPole-v1, PPO", 475),
    "ppo_lunarlander": ("LunarLander-v3, PPO", 200),
    "ppo_halfcheetah": ("HalfCheetah-v5, PPO", 3000),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    figure, axes = plt.subplots(1, len(SHOWN), figsize=(12, 3.2), layout="constrained")
    for axis, (conf, (title, bar)) in zip(axes, SHOWN.items()):
        rows = tables.read_rows(DOCS / "results" / f"{conf}-curve.csv")
        for seed in dict.fromkeys(row["seed"] for row in rows):
            own = [row for row in rows if row["seed"] == seed]
            steps = [int(row["env_steps"]) / 1000 for row in own]
            axis.plot(steps, [float(row["mean"]) for row in own], linewidth=1.5, alpha=0.85)
        axis.axhline(bar, color="grey", linewidth=0.8, linestyle="--")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("thousand environment steps")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("mean return of 20 episodes")
    (DOCS / "pictures").mkdir(exist_ok=True)
    figure.savefig(DOCS / "pictures" / "learning_curves.png", dpi=110)


if __name__ == "__main__":
    main()
