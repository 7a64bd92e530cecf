"""`alfish crossplay`: every pair in both seats, restartable, with ratings."""

import csv
import json

import numpy as np
import pytest

from alfish.__main__ import main
from alfish.runs.checkpoints import Checkpoints
from alfish.training.evaluations.crossplay import Match, Player, Standings

TICTACTOE = """
include 'ppo.gin'
import alfish.environments.games
import alfish.training.leagues
Trainer.environment = @make_games
make_games.game = 'pettingzoo.classic.tictactoe.tictactoe'
make_games.num_games = 4
Trainer.policies = {'main': '*', 'past': ('*', 2)}
past/PolicySettings.snapshot_of = 'main'
Trainer.extra_listeners = [@Snapshots()]
Snapshots.period = 60
Trainer.num_env_steps = 200
Trainer.unroll_length = 16
Trainer.calibration = None
Trainer.listeners = [@CheckpointSaver()]
CheckpointSaver.period = 70
CheckpointSaver.keep_last = 9
EpochBatches.num_epochs = 1
EpochBatches.minibatch_size = 8
MLP.layers = (8,)
Learner.compile = False
"""
NUM_GAMES = 2  # of a pair
TAG = """
include 'ppo.gin'
import alfish.environments.games
Trainer.environment = @make_games
make_games.game = 'toy_games:Tag'
Trainer.policies = {'chaser': 'adversary_*', 'runner': 'agent_*'}
Trainer.num_iterations = 1
Trainer.unroll_length = 8
Trainer.calibration = None
Trainer.listeners = [@CheckpointSaver()]
EpochBatches.num_epochs = 1
EpochBatches.minibatch_size = 4
MLP.layers = (8,)
Learner.compile = False
"""


def train(path, text):
    conf = path.with_suffix(".gin")
    conf.write_text(text)
    assert main(["train", f"--gin_file={conf}", f"--root_dir={path}"]) == 0
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("crossplay") / "run", TICTACTOE)


@pytest.fixture
def crossplay(tmp_path, capsys):
    """Plays; returns the rows of both tables, and the lines about pairs that were played."""

    def crossplay(*flags, output="cross.csv", status=0):
        capsys.readouterr()
        path = tmp_path / output
        assert main(["crossplay", f"--output={path}", f"--num_games={NUM_GAMES}", *flags]) == status
        lines = capsys.readouterr().err.splitlines()
        if status:
            return lines
        names = path, path.with_name(f"{path.stem}-players.csv")
        tables = [list(csv.DictReader(name.read_text().splitlines())) for name in names]
        return *tables, [line for line in lines if " against " in line]

    return crossplay


def steps_of(run):
    return Checkpoints(run / "checkpoints").steps()


def test_every_pair_plays_in_both_seats(run, crossplay):
    matches, players, lines = crossplay(f"--root_dir={run}", "--checkpoints=all")
    names = [f"main@{run}:{steps}" for steps in steps_of(run)]
    assert len(names) >= 3
    pairs = [(row["first"], row["second"]) for row in matches]
    assert pairs == [(one, other) for one in names for other in names if one != other] and len(lines) == len(pairs)
    for row in matches:
        assert int(row["wins"]) + int(row["draws"]) + int(row["losses"]) == int(row["games"]) == NUM_GAMES
        net = (int(row["wins"]) - int(row["losses"])) / NUM_GAMES
        assert float(row["mean_return/first"]) == -float(row["mean_return/second"]) == pytest.approx(net)
        assert float(row["ci_low/first"]) <= net <= float(row["ci_high/first"])
    assert {row["player"] for row in players} == set(names)
    elo = [float(row["elo"]) for row in players]
    assert elo == sorted(elo, reverse=True) and 1000.0 in elo
    for row in players:
        own = [_net(match, row["player"]) for match in matches if row["player"] in (match["first"], match["second"])]
        assert float(row["mean_return"]) == pytest.approx(np.mean(own))


def _net(row, name):
    return float(row["mean_return/first"]) * (1 if row["first"] == name else -1)


def test_the_same_command_continues(run, crossplay, tmp_path):
    flags = f"--root_dir={run}", "--checkpoints=all"
    matches, players, lines = crossplay(*flags)
    files = sorted((tmp_path / "cross-games").iterdir())
    files[0].unlink()
    again = crossplay(*flags)
    assert again[:2] == (matches, players) and len(again[2]) == 1 and again[2][0] in lines
    assert crossplay(*flags)[2] == []
    assert len(crossplay(*flags, "--seed=5")[2]) == len(lines)  # other games
    assert crossplay(*flags, "--num_envs=1", output="other.csv")[0] == matches
    for file in (tmp_path / "cross-games").iterdir():
        file.write_text(json.dumps({**json.loads(file.read_text()), "returns": [[0.0]]}))
    words = crossplay(*flags, status=2)[-1]
    assert "is not a result of `alfish crossplay` (it has another number of games); remove it" in words


def test_players_are_policies_of_several_runs_and_checkpoints(run, crossplay, tmp_path):
    other = train(tmp_path / "other", TICTACTOE.replace("Trainer.num_env_steps = 200", "Trainer.num_env_steps = 100"))
    last = steps_of(run)[-1]
    matches, players, _ = crossplay(f"--root_dir={run}", f"--root_dir={other}", "--policies=main,past1")
    names = [f"main@{run}:{last}", f"past1@{run}:{last}"]
    names += [f"{policy}@{other}:{steps_of(other)[-1]}" for policy in ("main", "past1")]
    assert {row["player"] for row in players} == set(names) and len(matches) == 12
    anchored = crossplay(f"--root_dir={run}", f"--root_dir={other}", "--policies=main,past1", f"--anchor={names[3]}")
    elo = {row["player"]: float(row["elo"]) for row in anchored[1]}
    assert elo[names[3]] == 1000 and anchored[0] == matches and anchored[2] == []


def test_a_random_player_plays_both_sides_and_may_be_the_anchor(run, crossplay, tmp_path):
    matches, players, _ = crossplay(f"--root_dir={run}", "--random", "--anchor=random")
    last = f"main@{run}:{steps_of(run)[-1]}"
    assert [(row["first"], row["second"]) for row in matches] == [(last, "random"), ("random", last)]
    assert {row["player"] for row in players} == {last, "random"}
    assert next(float(row["elo"]) for row in players if row["player"] == "random") == 1000
    for row in matches:
        assert float(row["mean_return/first"]) == -float(row["mean_return/second"])
    files = {path.read_bytes() for path in (tmp_path / "cross-games").iterdir()}
    again = crossplay(f"--root_dir={run}", "--random", "--num_envs=3", output="again.csv")[0]
    assert again == matches and {path.read_bytes() for path in (tmp_path / "again-games").iterdir()} == files


@pytest.mark.parametrize("max_cycles, num_played", [(5, 0), (6, 4)])
def test_games_of_other_settings_are_played_again(crossplay, tmp_path, max_cycles, num_played):
    runs = [
        train(tmp_path / str(number), f"{TAG}make_games.game_kwargs = {{'max_cycles': {cycles}}}")
        for number, cycles in enumerate([5, max_cycles])
    ]
    flags = [f"--root_dir={run}" for run in runs]
    assert len(crossplay(*flags)[2]) == 4
    assert len(crossplay(*reversed(flags))[2]) == num_played


def test_policies_of_different_roles_play_only_their_own(crossplay, tmp_path):
    run = train(tmp_path / "tag", TAG)
    matches, players, _ = crossplay(f"--root_dir={run}")
    (row,) = matches
    assert (row["first"].partition("@")[0], row["second"].partition("@")[0]) == ("chaser", "runner")
    # The reward of step t is t + 1; the chasers are there for 5 and for 3 steps.
    assert float(row["mean_return/first"]) == (15 + 6) / 2 and float(row["mean_return/second"]) == 15
    assert row["wins"] == row["draws"] == "" and all(one["elo"] == one["exploitability"] == "" for one in players)
    assert crossplay(f"--root_dir={run}", "--sides=agent_*,adversary_*")[0][0]["first"].startswith("runner")


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--policies=man"], "has no policy 'man'; its policies are main, past0, past1"),
        (["--checkpoints=7"], "has no checkpoint 7; its checkpoints are ["),
        (["--sides=player_1"], "crossplay is for two sides, which have all agents of the game once"),
        (["--checkpoints=latest"], "crossplay has 1 players, and no two of them play"),
        (["--anchor=x"], "--anchor is 'x'; the players are main@"),
        (["--checkpoints=newest"], "--checkpoints is 'newest'; it must be all, latest, best"),
    ],
)
def test_what_cannot_be_played_is_refused(run, crossplay, flags, sentence):
    (words,) = crossplay(f"--root_dir={run}", *flags, status=2)
    assert sentence in words


def test_a_player_without_a_side_is_named(crossplay, tmp_path):
    policies = "{'one': 'adversary_0', 'other': 'adversary_1', 'runner': 'agent_*'}"
    run = train(tmp_path / "tag", f"{TAG}Trainer.policies = {policies}")
    (words,) = crossplay(f"--root_dir={run}", "--sides=adversary_*,agent_*", "--random", status=2)
    assert "one@" in words and "plays adversary_0 in its run, and can play neither of the sides" in words


def test_standings_of_matches_made_by_hand():
    players = [Player(name, "runs/x", 5, "", frozenset("ab")) for name in "pqr"]
    games = {(0, 1): [1, 1, 1, -1], (1, 0): [-1, -1, -1, 0], (0, 2): [-1, -1, 0, 0], (2, 1): [1, 1, 1, 1]}
    matches = [Match(*pair, np.array([own, [-one for one in own]], float)) for pair, own in games.items()]
    standings = Standings(players, matches)
    assert standings.is_zero_sum
    header, *rows = standings.match_table()
    assert rows[0][:4] == ["p@runs/x:5", "q@runs/x:5", 4, 0.5] and rows[0][-3:] == [3, 0, 1]
    assert rows[1][-3:] == [0, 1, 3]
    # p wins (2 + 3) / 8 against q in both seats; r wins 1/2 against p, and each game against q.
    np.testing.assert_allclose(standings.exploitability, [0.5, 1.0, -0.5])
    np.testing.assert_allclose(standings.means, [(5 / 8 - 0.5) / 2, (-5 / 8 - 1) / 2, (0.5 + 1) / 2])
    assert [row[0] for row in standings.player_table()[1:]] == ["r@runs/x:5", "p@runs/x:5", "q@runs/x:5"]
    other = Standings(players, [*matches, Match(1, 2, np.array([[1.0], [1.0]]))])
    assert not other.is_zero_sum and other.ratings is None and other.match_table()[1][-1] is None
