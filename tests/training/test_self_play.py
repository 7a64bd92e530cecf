"""Self-play: the game, whom one plays against, and that games are the same from the same seed and checkpoints."""

from pathlib import Path

import gin
import numpy as np
import pytest
import torch
from gymnasium import spaces

import alfish
from alfish import nest
from alfish.__main__ import main
from alfish.errors import UsageError
from alfish.runs.checkpoints import Checkpoints
from benchmarks.self_play import compare, play
from examples import self_play
from examples.connect_four import COLUMNS, ROWS, ConnectFour
from examples.self_play import SelfPlay

PROJECT = Path(__file__).parents[2]
SMALL = (
    "make_environment.num_envs = 4",
    "Trainer.num_env_steps = 1000",
    "Trainer.unroll_length = 32",
    "EpochBatches.minibatch_size = 128",
    "EpochBatches.num_epochs = 1",
    "CheckpointSaver.period = 250",
    "CheckpointSaver.keep_period = 250",
    "Evaluate.num_episodes = 2",
    "MLP.layers = (16,)",
)


def train(root_dir, *bindings, files=()):
    files = [str(PROJECT / "examples" / "ppo_connect_four.gin"), *files]
    arguments = [*(f"--gin_file={file}" for file in files), f"--root_dir={root_dir}"]
    own = f"SelfPlay.directories = ['{root_dir}']"
    assert main(["train", *arguments, *(f"--gin_param={one}" for one in (*SMALL, own, *bindings))]) == 0
    return str(root_dir)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("self_play") / "run")


def moved(*columns, num_random_moves=0):
    """The game after these moves, and what the last one returned."""
    game = ConnectFour(num_random_moves)
    game.reset(seed=0)
    for column in columns:
        result = game.step(column)
    return game, result


@pytest.mark.parametrize(
    "columns",
    [
        (0, 1, 0, 1, 0, 1, 0),
        (3, 3, 4, 4, 5, 5, 6),
        (0, 1, 1, 2, 2, 3, 2, 3, 3, 6, 3),
        (6, 5, 5, 4, 4, 3, 4, 3, 3, 0, 3),
    ],
    ids=["vertical", "horizontal", "rising", "falling"],
)
def test_four_in_a_line_wins_for_the_moving_side(columns):
    game = ConnectFour()
    game.reset(seed=0)
    results = [game.step(column)[1:4] for column in columns]
    assert results == [*[(0.0, False, False)] * (len(columns) - 1), (1.0, True, False)]


def test_no_line_crosses_an_edge():
    _, (_, reward, terminated, _, _) = moved(0, 1, 0, 1, 0, 1, 3, 0, 2, 0, 3, 0, 1)
    assert not terminated and reward == 0  # a column's top and the next one's bottom are no line


def test_a_full_column_selects_the_next_open_column():
    game, _ = moved(*[6] * 6)
    observation = game.step(6)[0].reshape(2, ROWS, COLUMNS)
    assert observation[1, 0, 0] == 1 and observation.sum() == 7
    game.step(5)
    assert game.step(0)[0].reshape(2, ROWS, COLUMNS)[1, 1, 0] == 1


def test_a_full_board_is_a_draw():
    _, (_, reward, terminated, truncated, _) = moved(*map(int, "112663045524166244165520312615443300520033"))
    assert (reward, terminated, truncated) == (0.0, True, False)


def test_the_observation_shows_the_stones_of_the_side_to_move_first():
    game, (observation, *_) = moved(3)
    assert observation.reshape(2, ROWS, COLUMNS)[1, 0, 3] == 1 and observation.sum() == 1
    observation, *_ = game.step(2)
    board = observation.reshape(2, ROWS, COLUMNS)
    assert board[0, 0, 3] == 1 and board[1, 0, 2] == 1 and observation.sum() == 2


def test_openings_depend_only_on_the_seed():
    first, again, other = (ConnectFour(6).reset(seed=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other) and first.sum() == 6


def episodes(env, seed, count=6):
    """What a learner that plays column k % 7 at its move k sees in these episodes."""
    seen = []
    for _ in range(count):
        observation, _ = env.reset(seed=seed)
        seed, ended, k = None, False, 0
        seen.append(observation)
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(k % COLUMNS)
            ended, k = terminated or truncated, k + 1
            seen += [observation, reward]
    return seen


def equal(one, other):
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other))


def test_games_depend_only_on_seed_and_checkpoints(run):
    env = SelfPlay(ConnectFour(2), [run])
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = episodes(env, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert equal(episodes(SelfPlay(ConnectFour(2), [run]), seed=5), first)
    assert not equal(episodes(SelfPlay(ConnectFour(2), [run]), seed=6), first)


def test_results_are_zero_sum_and_both_seats_are_played():
    env = SelfPlay(ConnectFour(), [])
    results, first_stones = [], []
    for k in range(200):
        observation, _ = env.reset(seed=k)
        first_stones.append(observation.sum())
        ended = False
        while not ended:
            _, reward, ended, _, _ = env.step(env.np_random.integers(COLUMNS))
        results.append(reward)
    assert {*results} <= {-1.0, 0.0, 1.0} and abs(np.mean(results)) < 0.25
    assert 60 < sum(first_stones) < 140  # stones of an opponent that moved first


def opponents(env, count=60):
    found = set()
    for _ in range(count):
        env.reset()
        found.add(None if env._opponent is None else env._opponent._runner)
    return found


def runners(run, steps):
    return {self_play._loaded(run, step)[1] for step in steps}


def test_opponents_are_checkpoints_of_less_progress_and_in_evaluations_all(run):
    steps = self_play._checkpoints(run)
    assert len(steps) == 4
    progress = [float(self_play._loaded(run, step)[0].algorithm.progress) for step in steps]
    assert progress == sorted(progress) and len({*progress}) == 4
    env = SelfPlay(ConnectFour(), [run])
    env.reset(seed=0)
    assert opponents(env) == runners(run, steps)
    env.set_progress(progress[2])
    assert opponents(env) == runners(run, steps[:2])
    env.set_progress(0.0)
    assert opponents(env) == {None}


def test_a_league_draws_from_several_runs_and_loads_each_checkpoint_once(run, tmp_path, monkeypatch):
    other = train(tmp_path / "other", "Trainer.seed = 1", "Trainer.num_env_steps = 300")
    loads, load = [], alfish.load
    monkeypatch.setattr(alfish, "load", lambda *arguments: loads.append(arguments) or load(*arguments))
    self_play._loaded.cache_clear()
    env, again = SelfPlay(ConnectFour(), [run, other]), SelfPlay(ConnectFour(), [run, other])
    env.reset(seed=0)
    again.reset(seed=1)
    found = opponents(env) | opponents(again)
    every = [(one, step) for one in (run, other) for step in self_play._checkpoints(one)]
    assert sorted(loads) == sorted(every)
    assert found == {self_play._loaded(*one)[1] for one in every}


def test_only_existing_complete_checkpoints_are_opponents(tmp_path, monkeypatch):
    run = train(tmp_path / "run", "Trainer.num_env_steps = 600")
    directory = Path(run) / "checkpoints"
    steps = self_play._checkpoints(run)
    (directory / ".checkpoint-000000009999.pt.tmp").write_bytes(b"half")
    (directory / "checkpoint-000000009999.pt.superseded").write_bytes(b"old")
    env = SelfPlay(ConnectFour(), [run])
    env.reset(seed=0)
    assert opponents(env) == runners(run, steps)

    load = alfish.load

    def load_late(root_dir, step):  # the run removes its oldest checkpoint when that has just been listed
        if step == steps[0]:
            (directory / f"checkpoint-{step:012d}.pt").unlink(missing_ok=True)
        return load(root_dir, step)

    self_play._loaded.cache_clear()
    monkeypatch.setattr(alfish, "load", load_late)
    assert opponents(env) == runners(run, steps[1:])


def test_a_broken_checkpoint_is_named(tmp_path):
    run = train(tmp_path / "run", "Trainer.num_env_steps = 300")
    for path in (Path(run) / "checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"checkpoint-\d+\.pt"):
        SelfPlay(ConnectFour(), [run]).reset(seed=0)


def test_a_directory_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="'runs/none', which does not exist; name this run's --root_dir"):
        SelfPlay(ConnectFour(), ["runs/none"])


def test_opponents_act_as_the_policy_of_their_checkpoint(run):
    step = self_play._checkpoints(run)[-1]
    policy, observation = alfish.load(run, step), ConnectFour(4).reset(seed=3)[0]
    for seed in range(20):
        torch.manual_seed(seed)
        expected = policy.act(observation, sample=True, first=True)
        assert self_play.Opponent(*self_play._loaded(run, step)).act(observation, seed) == expected


def parameters(root_dir):
    return nest.leaves(Checkpoints(Path(root_dir) / "checkpoints").load()[1]["algorithm"])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [False, True])
def test_equal_seeds_make_equal_runs(workers, tmp_path):
    lockstep = (
        "Trainer.unroller = @AsyncUnroller",
        "AsyncUnroller.num_workers = 2",
        "AsyncUnroller.mode = 'lockstep'",
        "AsyncUnroller.envs_per_worker = 2",
    )
    bindings, files = (lockstep, ["appo.gin"]) if workers else ((), [])
    one, other = (parameters(train(tmp_path / name, *bindings, files=files)) for name in ("one", "other"))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_match_counts_both_seats_from_the_same_openings(run):
    first, *_, last = (alfish.load(run, step) for step in self_play._checkpoints(run))
    results = play((last, last), (False, False), 20, 4)
    assert results.shape == (20, 2) and (results[:, 0] == -results[:, 1]).all()  # the same games, seats exchanged
    there, back = play((last, first), (False, False), 20, 4), play((first, last), (False, False), 20, 4)
    assert (there == -back[:, ::-1]).all()


def test_the_table_of_a_run_has_each_earlier_checkpoint(run):
    rows = compare(run, 10, 4)
    *earlier, _ = self_play._checkpoints(run)
    assert [(row["checkpoint"], row["acts_by"]) for row in rows] == [
        (checkpoint, acts_by) for acts_by in ("mode", "sample") for checkpoint in (*earlier, "all")
    ]
    for row in rows:
        assert row["wins"] + row["draws"] + row["losses"] == row["games"] == (60 if row["checkpoint"] == "all" else 20)
        assert float(row["low"]) <= float(row["win_share"]) <= float(row["high"])
        assert float(row["win_share"]) == pytest.approx(row["wins"] / row["games"], abs=1e-3)


class Illegal(Exception):
    pass


@gin.configurable
class MaskedConnectFour(ConnectFour):
    """Connect four with a mask of the open columns in the observation; any other choice raises."""

    observation_space = spaces.Dict(
        {"board": ConnectFour.observation_space, "action_mask": spaces.Box(0, 1, (COLUMNS,), np.int8)}
    )

    def step(self, action):
        if self._heights[int(action)] == ROWS:
            raise Illegal
        return super().step(action)

    def _observation(self):
        mask = np.array([height < ROWS for height in self._heights], np.int8)
        return {"board": super()._observation(), "action_mask": mask}


def test_opponents_follow_an_action_mask(tmp_path):
    bindings = (
        "make_environment.env_id = @MaskedConnectFour",
        "make_environment.action_mask = 'observation:action_mask'",
    )
    run = train(tmp_path / "run", *bindings, "ConnectFour.num_random_moves = 0")
    game = MaskedConnectFour()
    observation, _ = game.reset(seed=0)
    for column in [0, 1] * 2 + [1, 0] + [0, 1] * 2 + [1, 0]:  # two columns are full
        observation, *_ = game.step(column)
    opponent = self_play.Opponent(*self_play._loaded(run, self_play._checkpoints(run)[0]))
    assert observation["action_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert {opponent.act(observation, seed) for seed in range(200)} == {2, 3, 4, 5, 6}
