"""Games between the policies of `ppo_tag.gin` and those of BenchMARL's IPPO after as many steps, in both directions.

  python -m benchmarks.tag --num_env_steps=2_000_000

`ppo_tag.gin` runs with its settings, and IPPO with BenchMARL's (benchmarks/runs/benchmarl_run.py). Both play
simple_tag_v3 of mpe2 with three chasers and a runner, in games of 25 steps. Steps are those of all agents. The chasers
of each side then play 200 games against each runner and against random moves; policies take the mode of their actions.

Writes docs/results/tag_benchmarl.csv, a row for each pairing, and prints it as a table. `--weights` and `--root_dir`
name finished trainings.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import alfish
from benchmarks import PROJECT, processes, tables

OUTPUT = PROJECT / "docs" / "results" / "tag_benchmarl.csv"
FIELDS = ("env_steps", "seed", "chasers", "runner", "num_games", "chasers_return", "low", "high", "runner_return")
NUM_AGENTS, FIRST_GAME = 4, 1000
Act = Callable[[np.ndarray], np.ndarray]  # actions [B] for observations [B, ...]


def of_peer(weights: Mapping[str, np.ndarray], group: str) -> Act:
    """Returns the policy of a group: layers of tanh, and the most likely action."""
    layers = [(weights[f"{group}/{k}/weight"], weights[f"{group}/{k}/bias"]) for k in range(3)]

    def act(x: np.ndarray) -> np.ndarray:
        for k, (weight, bias) in enumerate(layers):
            x = x @ weight.T + bias
            x = np.tanh(x) if k + 1 < len(layers) else x
        return x.argmax(-1)

    return act


def play(chasers: Act, runner: Act | None, num_games: int) -> dict[str, Any]:
    """Returns a row's results; without a runner, its moves are random."""
    from mpe2 import simple_tag_v3  # an optional package

    returns = np.zeros((num_games, 2))  # of a chaser, whose rewards are those of all, and of the runner
    for k in range(num_games):
        game = simple_tag_v3.parallel_env(max_cycles=25)
        observations, _ = game.reset(seed=FIRST_GAME + k)
        rng = np.random.default_rng(FIRST_GAME + k)
        *names, last = game.agents
        while game.agents:
            moves = chasers(np.stack([observations[name] for name in names])).tolist()
            evading = int(rng.integers(5)) if runner is None else int(runner(observations[last][None])[0])
            observations, rewards, *_ = game.step({**dict(zip(names, moves)), last: evading})
            returns[k] += rewards[names[0]], rewards[last]
    means = np.random.default_rng(0).choice(returns[:, 0], (tables.NUM_DRAWS, num_games)).mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    shown = dict(zip(FIELDS[-4:], (returns[:, 0].mean(), low, high, returns[:, 1].mean())))
    return {"num_games": num_games} | {name: f"{value:.2f}" for name, value in shown.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_env_steps", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_games", type=int, default=200)
    parser.add_argument("--weights", type=Path, help="of a finished training of the peer")
    parser.add_argument("--root_dir", type=Path, help="of a finished run of ppo_tag.gin")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = arguments.root_dir or Path(directory) / "run"
        if arguments.root_dir is None:
            settings = (f"Trainer.num_env_steps = {arguments.num_env_steps}", f"Trainer.seed = {arguments.seed}")
            chosen = [f"--gin_param={one}" for one in settings]
            processes.alfish("train", "--gin_file=ppo_tag.gin", f"--root_dir={root}", *chosen)
        weights = arguments.weights or Path(directory) / "weights.npz"
        if arguments.weights is None:
            script = str(PROJECT / "benchmarks" / "runs" / "benchmarl_run.py")
            chosen = [f"--seed={arguments.seed}", f"--frames={arguments.num_env_steps // NUM_AGENTS}"]
            command = [processes.peer_python("benchmarl"), script, *chosen, f"--output={weights}"]
            subprocess.run(command, check=True, env=processes.with_threads(1))
        peer = np.load(weights)
        own = {name: alfish.load(root, policy=name, allow_import=["mpe2"]) for name in ("chaser", "runner")}
        chasers: dict[str, Act] = {
            "alfish": lambda x: own["chaser"].act(x, batched=True),
            "BenchMARL": of_peer(peer, "adversary"),
        }
        runners: dict[str, Act | None] = {
            "alfish": lambda x: own["runner"].act(x, batched=True, first=True),
            "BenchMARL": of_peer(peer, "agent"),
            "random": None,
        }
        found = {"alfish": own["chaser"].env_steps, "BenchMARL": int(peer["frames"]) * NUM_AGENTS}
        if any(abs(steps - arguments.num_env_steps) > 0.05 * arguments.num_env_steps for steps in found.values()):
            parser.error(f"the trainings have {found} steps; give --num_env_steps near both")
        print(f"BenchMARL: {int(peer['frames']):,} frames in {float(peer['seconds']):,.0f} s")
        shared = {"env_steps": arguments.num_env_steps, "seed": arguments.seed}
        rows = [
            shared | {"chasers": name, "runner": other} | play(act, evading, arguments.num_games)
            for name, act in chasers.items()
            for other, evading in runners.items()
        ]
    tables.replace_rows(OUTPUT, rows, FIELDS, ("env_steps", "seed", "chasers", "runner"))
    print(tables.header(FIELDS), *(tables.line(one.values()) for one in rows), sep="\n")


if __name__ == "__main__":
    main()
