"""Games of connect four between the final policy of a run of self-play and the policies of its earlier checkpoints.

  alfish train --gin_file=examples/ppo_connect_four.gin --root_dir=runs/connect_four
  python -m benchmarks.self_play

Each opening is played from both seats. The final policy takes the mode of its actions. The opponent does so too
('mode'), or samples them as in training ('sample'). The intervals are bootstrapped over openings. Prints a Markdown
table, and writes docs/results/connect_four.csv.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import alfish
from alfish.runs.checkpoints import Checkpoints
from alfish.training.policy import Policy
from benchmarks import PROJECT, tables
from examples.connect_four import ConnectFour

FIELDS = ("checkpoint", "acts_by", "wins", "draws", "losses", "games", "win_share", "low", "high")


def play(policies: tuple[Policy, Policy], samples: tuple[bool, bool], openings: int, num_random_moves: int):
    """Returns the results of two games from each opening, `[openings, 2]`: 1, 0, -1 where policy 0 wins, draws, loses.

    Policy 0 moves first in game 0, policy 1 in game 1.

    Args:
      policies: without memory.
      samples: whether they sample their actions.
      openings: their number; opening k is that of `ConnectFour.reset(seed=k)`.
      num_random_moves: of an opening.
    """
    games = [ConnectFour(num_random_moves) for _ in range(2 * openings)]
    observations = [game.reset(seed=k // 2)[0] for k, game in enumerate(games)]
    results, is_open = np.zeros(2 * openings), np.ones(2 * openings, bool)
    moving = np.arange(2 * openings) % 2  # the policy that moves next in each game
    while is_open.any():
        for side in (0, 1):
            rows = np.flatnonzero(is_open & (moving == side)).tolist()
            if not rows:
                continue
            batch = np.stack([observations[k] for k in rows])
            for k, action in zip(rows, policies[side].act(batch, batched=True, sample=samples[side], first=True)):
                observations[k], reward, ends, _, _ = games[k].step(action)
                is_open[k], results[k] = not ends, reward if side == 0 else -reward
            moving[rows] = 1 - side
    return results.reshape(openings, 2)


def row(checkpoint: int | str, acts_by: str, results: np.ndarray) -> dict[str, Any]:
    """Returns a row of the table for the results `[openings, ...]` of games."""
    wins = (results > 0).reshape(len(results), -1).mean(1)
    means = np.random.default_rng(0).choice(wins, (tables.NUM_DRAWS, len(wins))).mean(1)
    shares = (f"{share:.3f}" for share in (wins.mean(), *np.percentile(means, [2.5, 97.5])))
    counts = (int((results == result).sum()) for result in (1, 0, -1))
    return dict(zip(FIELDS, (checkpoint, acts_by, *counts, results.size, *shares)))


def compare(root_dir: str, openings: int, num_random_moves: int) -> list[dict[str, Any]]:
    """Returns a row for each earlier checkpoint of a run and each way to act, and for all of them together."""
    steps = Checkpoints(Path(root_dir) / "checkpoints").steps()
    if len(steps) < 2:
        raise SystemExit(f"{root_dir} has {len(steps)} checkpoints; a comparison needs two: train there first")
    *earlier, last = steps
    final, rows = alfish.load(root_dir, last, allow_import=["examples"]), []
    for acts_by in ("mode", "sample"):
        results = []
        for checkpoint in earlier:
            torch.manual_seed(0)
            pair = final, alfish.load(root_dir, checkpoint, allow_import=["examples"])
            results.append(play(pair, (False, acts_by == "sample"), openings, num_random_moves))
            rows.append(row(checkpoint, acts_by, results[-1]))
        rows.append(row("all", acts_by, np.concatenate(results, axis=1)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root_dir", default="runs/connect_four")
    parser.add_argument("--openings", type=int, default=500, help="each of them is two games")
    parser.add_argument("--num_random_moves", type=int, default=4, help="moves of an opening")
    parser.add_argument("--output", type=Path, default=PROJECT / "docs" / "results" / "connect_four.csv")
    arguments = parser.parse_args()
    rows = compare(arguments.root_dir, arguments.openings, arguments.num_random_moves)
    tables.write_rows(arguments.output, rows, FIELDS)
    print(tables.header(FIELDS), *(tables.line(one.values()) for one in rows), sep="\n")


if __name__ == "__main__":
    main()
