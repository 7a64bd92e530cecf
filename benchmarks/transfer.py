"""What an encoder of another run is worth in a second task, and the speed of runs with frozen encoders.

  python -m benchmarks.transfer                   # learning; one run takes 10 to 20 seconds
  python -m benchmarks.transfer --speed           # speed, on an idle machine

Learning: the source is `ppo_catch`. The second task is Catch with left and right exchanged, which has the same images,
and another policy. Each variant trains with the same seeds: from new weights, with the source's encoder frozen in the
network, with its features in place of the images (`FrozenEncoder`), with the encoder trained on at a hundredth of the
learning rate, and with a new encoder frozen, as a control. The measure is the number of environment steps up to the
first of two consecutive evaluations of at least --threshold, of 50 episodes each, every 250 steps.

Speed: DQN on Catch of 80 x 40 pixels, with NatureCNN trained, frozen in the network, and in front of it. The measures
are environment steps per second of a whole run, with one update for each four steps, and the bytes of an observation in
replay.

Writes `docs/results/transfer.csv` or `docs/results/transfer-speed.csv` and prints a table of them.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import alfish
from alfish.environments.toy import Catch
from alfish.transforms import FrozenEncoder
from benchmarks import PROJECT, tables

RESULTS = PROJECT / "docs" / "results"
ENCODER = "network.actor_torso.encoder"
TASK = {"Catch.mirrored": True}
EVALUATIONS = {"Evaluate.period": 250, "Evaluate.num_episodes": 50}
# Settings of the second run; SOURCE is replaced by the directory of the first.
LEARNING: dict[str, dict[str, Any]] = {
    "new weights": {},
    "encoder frozen": {"initial_parts": {ENCODER: "SOURCE"}, "Learner.frozen_parts": [ENCODER]},
    "features stored": {
        "transforms": [FrozenEncoder],
        "FrozenEncoder.source": f"{ENCODER}.encoders.0@SOURCE",
    },
    "encoder at 1e-5": {
        "initial_parts": {ENCODER: "SOURCE"},
        "Learner.learning_rate": {"all": 1e-3, ENCODER: 1e-5},
    },
    "new encoder, frozen": {"Learner.frozen_parts": [ENCODER]},
}
Q_ENCODER = "q_network.torso.encoder"
SPEED: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen in the network": {"Learner.frozen_parts": [Q_ENCODER]},
    "features stored": {"transforms": [FrozenEncoder]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--root", default="runs/transfer")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--steps", type=int, default=8000, help="of a run that measures speed")
    arguments = parser.parse_args()
    measure = speed if arguments.speed else learning
    path = RESULTS / ("transfer-speed.csv" if arguments.speed else "transfer.csv")
    for seed in arguments.seeds.split(","):
        rows = measure(int(seed), arguments)
        tables.replace_rows(path, rows, rows[0], ["variant", "seed"], lambda row: int(row["seed"]))
    print(table(tables.read_rows(path)))


def learning(seed: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for the source and for each variant."""
    root = PROJECT / arguments.root
    common: dict[str, Any] = {"conf": "ppo_catch", "seed": seed, **EVALUATIONS}
    source = root / f"seed{seed}" / "source"
    alfish.train(root_dir=source, **common)
    rows = [{"variant": "source", "seed": seed} | first_solved(source, arguments.threshold)]
    for variant, settings in LEARNING.items():
        run = root / f"seed{seed}" / variant.replace(" ", "-").replace(",", "")
        given = {name: _with_source(value, str(source)) for name, value in settings.items()}
        alfish.train(root_dir=run, **{**common, "seed": seed + 1000, **TASK, **given})
        rows.append({"variant": variant, "seed": seed} | first_solved(run, arguments.threshold))
        print(rows[-1], flush=True)
    return rows


def speed(seed: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each variant."""
    rows = []
    for variant, settings in SPEED.items():
        run = PROJECT / arguments.root / "speed" / f"{variant.replace(' ', '-')}-{seed}-{time.time_ns()}"
        began = time.perf_counter()
        policy = alfish.train(
            conf="dqn",
            environment=Catch,
            root_dir=run,
            seed=seed,
            num_env_steps=arguments.steps,
            listeners=[],
            **{
                "Catch.scale": 8,
                "make_environment.num_envs": 8,
                "ReplayBatches.updates_per_env_step": 0.25,
                **settings,
            },
        )
        seconds = time.perf_counter() - began
        stored = policy.transforms.stored_observation_spec
        num_bytes = int(np.prod(stored.shape)) * stored.dtype.itemsize
        rows.append({"variant": variant, "seed": seed, "steps_per_second": round(arguments.steps / seconds, 1)})
        rows[-1]["observation_bytes"] = num_bytes
        print(rows[-1], flush=True)
    return rows


def first_solved(root_dir: Path, threshold: float) -> dict[str, Any]:
    """Returns the steps of the first of two consecutive evaluations that reach a threshold, and the last return."""
    means = {}
    for path in sorted((root_dir / "eval").glob("evaluation-*.csv")):
        returns = [float(episode["return"]) for episode in tables.read_rows(path)]
        means[int(path.stem.removeprefix("evaluation-"))] = float(np.mean(returns))
    steps = list(means)
    solved = [a for a, b in zip(steps, steps[1:]) if min(means[a], means[b]) >= threshold]
    return {"solved_at": solved[0] if solved else "", "last_return": means[steps[-1]]}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a Markdown table with a line for each variant: means over the seeds, and the first measure of each."""
    measures = [name for name in rows[0] if name not in ("variant", "seed")]
    lines = [tables.header(["variant", *(f"{name}, mean" for name in measures), f"{measures[0]}, each seed"])]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == variant]
        columns = [[row[name] for row in own] for name in measures]
        means = [f"{np.mean([float(one) for one in column]):.4g}" if all(column) else "" for column in columns]
        lines.append(tables.line([variant, *means, ", ".join(str(value or "never") for value in columns[0])]))
    return "\n".join(lines)


def _with_source(value: Any, source: str) -> Any:
    """Returns a setting with the directory of the source in it."""
    if isinstance(value, dict):
        return {name: _with_source(one, source) for name, one in value.items()}
    return value.replace("SOURCE", source) if isinstance(value, str) else value


if __name__ == "__main__":
    main()
