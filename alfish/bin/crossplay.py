"""Plays games between the policies of runs at several checkpoints, and rates them.

  alfish crossplay --root_dir=runs/league --checkpoints=all --output=cross.csv
  alfish crossplay --root_dir=runs/a --root_dir=runs/b --num_games=100 --output=cross.csv
  alfish crossplay --root_dir=runs/league --checkpoints=all --random --anchor=random --output=cross.csv
  alfish crossplay --root_dir=runs/tag --sides='adversary_*,agent_*' --checkpoints=all --output=cross.csv

Players are the policies that train (or the policies of --policies) in each run, at each of --checkpoints. --random adds
a player `random`, which takes uniformly random actions among the allowed ones. Every two players play against each
other, in both seatings unless a player's policy has only one seat in its run. All games are made with the first run's
settings. Game k of each pair has the seed `seed + k`.

--output has a row for each pair and seating: mean returns of both sides with 95 % bootstrap intervals, and the numbers
of games that the first side has won, drawn and lost. A second file, whose name ends in -players.csv, has a row for each
player. In zero-sum games, the row has the player's Elo rating and exploitability. Elo ratings are the maximum
likelihood of the Bradley-Terry model, with 95 % bootstrap intervals over games. A draw counts as half a win. The player
--anchor has the rating 1000. Exploitability is the mean return of the best opponent against the player.

The result of each pair is stored next to --output, in a directory whose name ends in -games. If the command is stopped,
run it again, and it continues. If players are added, it plays only the games of the new pairs.
"""

import sys
from typing import TYPE_CHECKING

from absl import flags

from alfish.bin import shared_flags, show
from alfish.errors import UsageError, counted, significant

if TYPE_CHECKING:
    from alfish.training.evaluations.crossplay import Player
    from alfish.training.policy import Policy

FLAGS = flags.FlagValues()
flags.DEFINE_multi_string("root_dir", [], "Directory of a run that trained in games; repeatable.", flag_values=FLAGS)
_WORDS = "Checkpoints of each run: all, latest, best, or numbers of steps."
flags.DEFINE_list("checkpoints", ["latest"], _WORDS, flag_values=FLAGS)
flags.DEFINE_list("policies", [], "Names of policies; default: all policies that train.", flag_values=FLAGS)
_WORDS = "Patterns of the agents of both sides, such as 'adversary_*,agent_*'; default: the two agents of the game."
flags.DEFINE_boolean("random", False, "Add the player 'random', with random actions.", flag_values=FLAGS)
flags.DEFINE_list("sides", [], _WORDS, flag_values=FLAGS)
flags.DEFINE_integer("num_games", 200, "Number of games of a pair in one seating.", 1, flag_values=FLAGS)
flags.DEFINE_integer("seed", 0, "Seed of game 0.", 0, shared_flags.LARGEST_SEED, flag_values=FLAGS)
_WORDS = "Sample actions as in training; with --nosample, all games of a deterministic environment are equal."
flags.DEFINE_boolean("sample", True, _WORDS, flag_values=FLAGS)
flags.DEFINE_string("anchor", None, "Player with Elo 1000, named as in the table; default: first.", flag_values=FLAGS)
flags.DEFINE_string("output", None, "File of the results, .csv.", flag_values=FLAGS)
flags.DEFINE_integer("num_envs", 8, shared_flags.NUM_ENVS, 1, flag_values=FLAGS)
flags.DEFINE_integer("max_length", None, shared_flags.MAX_LENGTH, 1, flag_values=FLAGS)
flags.DEFINE_string("device", "cpu", "cpu, cuda or cuda:N.", flag_values=FLAGS)
flags.DEFINE_multi_string("allow_import", [], shared_flags.ALLOW_IMPORT, flag_values=FLAGS)


def main(flag_values: flags.FlagValues) -> int:
    import contextlib

    from alfish.analysis.tables import as_csv, as_text
    from alfish.configuration.opening import load, open_run
    from alfish.runs.files import write_atomically
    from alfish.training.evaluations.crossplay import Crossplay, Standings, players_of, random_player, sides_of

    for root_dir in flag_values.root_dir or [None]:
        shared_flags.check_root_dir(root_dir)
    output = shared_flags.output_file(flag_values.output, ".csv")
    given = flag_values.device, flag_values.allow_import
    names = "all", "latest", "best"
    checkpoints = [shared_flags.checkpoint(one, "checkpoints", names) for one in flag_values.checkpoints]
    players: list[Player] = []
    for root_dir in flag_values.root_dir:
        with open_run(root_dir, *given) as trainer:
            players += players_of(trainer, root_dir, checkpoints, flag_values.policies)

    def policy_of(player: "Player") -> "Policy":
        return load(player.run, player.steps, *given, policy=player.policy)

    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(open_run(flag_values.root_dir[0], *given))
        evaluator = trainer.evaluator(flag_values.num_games, flag_values.num_envs, flag_values.max_length)
        stack.callback(evaluator.close)
        sides = sides_of(evaluator.environment, flag_values.sides, players)  # type: ignore[arg-type]
        if flag_values.random:
            players.append(random_player(evaluator.environment))  # type: ignore[arg-type]
        anchor = _anchor(players, flag_values.anchor)
        directory = output.with_name(f"{output.stem}-games")
        games = flag_values.num_games, flag_values.seed, flag_values.sample
        crossplay = Crossplay(evaluator, players, sides, directory, policy_of, *games, _log)  # type: ignore[arg-type]
        _log(f"{counted(len(players), 'player')}, {counted(len(crossplay.pairs), 'pairing')}")
        standings = Standings(players, crossplay.matches(), anchor)
    write_atomically(output, as_csv(standings.match_table()))
    table = standings.player_table()
    write_atomically(output.with_name(f"{output.stem}-players.csv"), as_csv(table))
    show(as_text([[_cell(value) for value in row] for row in table]))
    return 0


def _anchor(players: "list[Player]", name: str | None) -> int:
    """Returns the index of the player that --anchor names."""
    names = [player.name for player in players]
    if name is not None and name not in names:
        raise UsageError(f"--anchor is {name!r}; the players are {', '.join(names)}")
    return 0 if name is None else names.index(name)


def _cell(value: str | float | None) -> str:
    return "" if value is None else value if isinstance(value, str) else significant(value)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
