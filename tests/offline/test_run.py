"""Rows of a run are read again, one by one, with the commands of a user."""

import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from data_sets import STAMPED, TOY, trained
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from recorded import SPACES, assert_rows, record, table_of
from toys import Stamped

from alfish.__main__ import main
from alfish.errors import UsageError
from alfish.offline import OfflineBuffer, limits, open_source
from alfish.offline.recorded_spaces import spaces_of
from alfish.offline.sources import run as run_source
from alfish.runs.checkpoints import Checkpoints
from alfish.specs import ObservationUnits

BANDIT = """
make_environment.env_id = @{env}
{settings}
make_environment.num_envs = 2
Trainer.num_env_steps = 60
Trainer.unroll_length = 4
ReplayBatches.capacity = 400
ReplayBatches.batch_size = 4
ReplayBatches.warmup_env_steps = 20
ReplayBatches.updates_per_env_step = 0.1
MLP.layers = (4,)
"""


@pytest.mark.parametrize(("steps", "truncates"), [(40, True), (200, False)])  # rings of 30 rows: filled once, wrapped
def test_every_row_that_a_run_keeps_is_an_episodes(tmp_path, truncates, steps):
    name = trained(tmp_path, TOY + STAMPED.format(truncates=truncates, steps=steps))
    read = list(open_source(name, SPACES).episodes())
    for episode in read:
        stamps = episode.observations
        assert (np.diff(stamps[:, 2]) == 1).all() and np.ptp(stamps[:, :2], 0).tolist() == [0, 0]
        assert episode.rewards.tolist() == stamps[1:, 2].tolist()
        lengths = (3, 5, 1, 8)
        whole = stamps[-1, 2] == lengths[int(stamps[0, 1]) % 4]
        flags = [bool(episode.terminated[-1]), bool(episode.truncated[-1])] if episode.length else [False, True]
        assert flags == [not truncates, truncates] if whole else flags == [False, True]
    for column in ("0.", "1."):
        rows = [tuple(row[1:]) for e in read if e.id.startswith(column) for row in e.observations]
        assert len(rows) == len(set(rows)) and rows == sorted(rows)  # each row once, and in their order
        assert len(rows) == 30 if steps == 200 else 20 < len(rows) <= 30
    buffer = OfflineBuffer([name], spaces=SPACES)
    assert_rows(buffer, [episode for episode in read if episode.length])


def test_rows_of_an_aligned_replay_are_the_same_episodes(tmp_path):
    """The environment is a functional one, which resets in the same step."""
    settings = """
make_environment.env_id = 'alfish/CartPole-v1'
make_environment.num_envs = 2
Trainer.num_env_steps = 600
Trainer.unroll_length = 300  # all updates follow the last action
ReplayBatches.batch_size = 4
ReplayBatches.warmup_env_steps = 100
ReplayBatches.capacity = 1200
MLP.layers = (4,)
"""
    aligned = "ReplayBatches.buffer = @AlignedRingBuffer\nAlignedRingBuffer.end_fraction = 0.5\n"
    episodes = []
    for name, more in (("aligned", aligned), ("plain", "")):
        (tmp_path / name).mkdir()
        source = trained(tmp_path / name, TOY + settings + more)
        episodes.append(list(open_source(source).episodes()))
    assert len(episodes[0]) == len(episodes[1]) > 10
    for found, expected in zip(*episodes):
        assert np.array_equal(found.observations, expected.observations)
        assert np.array_equal(found.actions, expected.actions)
        assert np.array_equal(found.terminated, expected.terminated)


def test_rows_that_were_never_written_need_no_memory(monkeypatch):
    capacity = 100_000
    state = {
        "pos": torch.tensor([5]),
        "start": torch.tensor([0]),
        "startable": torch.zeros(capacity, 1, dtype=torch.bool),
        "length": capacity,
        "rows": {"observation": torch.zeros(5, 3)},
    }
    monkeypatch.setattr(limits, "memory_at_hand", lambda: 60)
    run_source._check_state(state)
    monkeypatch.setattr(limits, "memory_at_hand", lambda: 59)
    with pytest.raises(UsageError, match="the replay needs 60 bytes of memory"):
        run_source._check_state(state)


def test_rows_of_other_learners_are_spoken_of(tmp_path):
    name = trained(tmp_path, TOY + STAMPED.format(truncates=True, steps=40))
    assert open_source(name, SPACES).warnings == []
    (Path(name.partition(":")[2]) / "ranks" / "rank-001" / "replay").mkdir(parents=True)
    assert open_source(name, SPACES).warnings[0].startswith("the rows of 1 other learners")


def test_actions_are_returned_in_environment_units(tmp_path):
    sac = "import toys\ninclude 'sac.gin'\n"
    name = trained(
        tmp_path, sac + BANDIT.format(env="Bandit", settings="Bandit.action = 'box'\nCriticEnsemble.layers = (4,)")
    )
    from toys import Bandit

    for episode in open_source(name, spaces_of(lambda: Bandit("box"))[0]).episodes():
        target = episode.observations[:-1].argmax(1)
        expected = 1 - np.abs(episode.actions[:, 0] - target) / 4
        np.testing.assert_allclose(episode.rewards, expected, atol=1e-5)
        assert episode.actions.min() >= -2 and episode.actions.max() <= 6


def test_discrete_actions_and_observations_begin_where_their_spaces_do(tmp_path):
    name = trained(tmp_path, TOY + BANDIT.format(env="Bandit", settings="Bandit.action = 'discrete'"))
    from toys import Bandit

    for episode in open_source(name, spaces_of(Bandit)[0]).episodes():
        assert (episode.rewards == (episode.actions + 1 == episode.observations[:-1].argmax(1))).all()
        assert episode.actions.min() >= -1 and episode.actions.max() <= 2


def test_observations_are_given_back_their_spaces_start_however_deep():
    deep = spaces.Tuple([spaces.Discrete(3, start=5), spaces.MultiDiscrete([2, 2], start=[1, -1]), SPACES.observation])
    space = spaces.Dict(digit=spaces.Discrete(3, start=-2), deep=deep)
    stored = {"digit": np.array([0, 2]), "deep": (np.array([1, 0]), np.array([[0, 1], [1, 0]]), np.ones((2, 3)))}
    own = ObservationUnits(space).to_environment(stored)
    assert own["digit"].tolist() == [-2, 0] and own["deep"][0].tolist() == [6, 5]
    assert own["deep"][1].tolist() == [[1, 0], [2, -1]] and own["deep"][2] is stored["deep"][2]


def test_a_run_without_rows_or_spaces_is_refused_with_the_missing_part(tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match="has no replay/checkpoint"):
        open_source(f"run:{tmp_path}/run", SPACES)
    name = trained(tmp_path, TOY + STAMPED.format(truncates=False, steps=40))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    steps, state = checkpoints.load("latest")
    del state["spaces"]  # as older versions saved it
    checkpoints.save(steps, state)
    with pytest.raises(UsageError, match="older version, without its environment's spaces; give .*--env_id"):
        open_source(name)
    assert list(open_source(name, SPACES).episodes())


def test_a_replay_with_other_content_is_named(tmp_path):
    name = trained(tmp_path, TOY + STAMPED.format(truncates=False, steps=40))
    checkpoints = Checkpoints(tmp_path / "run/replay", keep_last=1)
    steps, state = checkpoints.load("latest")
    for change in (
        {"length": 10**12},
        {"length": -1},
        {"length": 30.5},
        {"pos": state["pos"] + 1000},
        {"start": state["pos"] + 1},
        {"start": state["start"][:1]},
        {"rows": None},
        {"rows": state["rows"][:1] + (torch.zeros(1).expand(44),)},
        {"startable": torch.zeros(1, 1, dtype=torch.bool).expand(10**4, 2), "length": 10**4},
    ):
        checkpoints.save(steps, state | change)
        with pytest.raises(UsageError, match=f"{tmp_path}/run"):
            list(open_source(name, SPACES).episodes())


# alfish import


def test_an_import_is_written_to_a_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for output in ("minari:pen/dulum-v0", "alfish:data"):
        assert import_("--source=npz:none.npz", f"--output={output}") == 2
        assert f"--output={output} begins with a scheme; give only the path of a directory" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def import_(*arguments):
    return main(["import", *map(str, arguments)])


@pytest.fixture
def npz(tmp_path):
    np.savez(tmp_path / "a.npz", **table_of(record()))
    return f"npz:{tmp_path}/a.npz"


def test_a_run_is_imported_without_its_environment_and_its_configuration(tmp_path, capsys):
    name = trained(tmp_path, TOY + STAMPED.format(truncates=True, steps=200))
    # A stranger's, which would run a program if anything were built from it.
    (tmp_path / "run" / "config.gin").write_text(
        "from __gin__ import dynamic_registration\nimport subprocess\nfrom alfish import trainer\n"
        f"subprocess.call.args = ['touch', '{tmp_path}/executed']\ntrainer.Trainer.environment = @subprocess.call()\n"
    )
    read = [episode for episode in open_source(name, SPACES).episodes() if episode.length]
    capsys.readouterr()
    assert import_(f"--source={name}", f"--output={tmp_path}/set") == 0
    said = capsys.readouterr().out
    assert f"{len(read)} kept" in said and "OfflineBuffer.sources = ['alfish:" in said
    buffer = OfflineBuffer([f"alfish:{tmp_path}/set"])
    assert buffer.spaces == SPACES
    assert_rows(buffer, read)
    assert not (tmp_path / "executed").exists()


def test_the_spaces_of_a_run_must_fit_those_of_the_environment(tmp_path, capsys):
    name = trained(tmp_path, TOY + STAMPED.format(truncates=True, steps=40))
    assert import_(f"--source={name}", "--env_id=CartPole-v1") == 2
    assert f"the observations of {name} are Box" in capsys.readouterr().err


def test_what_is_imported_is_read_again_with_the_environments_spaces(tmp_path, npz, capsys, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Stamped-v0", EnvSpec("Stamped-v0", Stamped))
    assert import_(f"--source={npz}", "--env_id=Stamped-v0", f"--output={tmp_path}/set") == 0
    page = capsys.readouterr().out
    for line in ("11 episodes read, 11 kept, 41 transitions (6 terminated, 5 truncated)", "return", "reward"):
        assert line in page
    buffer = OfflineBuffer([f"alfish:{tmp_path}/set"])
    assert buffer.spaces == SPACES
    assert_rows(buffer, record())


def test_several_sources_become_one(tmp_path, npz):
    assert import_(f"--source={npz}", f"--source={npz}", f"--output={tmp_path}/set") == 0
    assert_rows(OfflineBuffer([f"alfish:{tmp_path}/set"], spaces=SPACES), record() + record())


def test_without_output_the_report_is_all(tmp_path, npz, capsys):
    assert import_(f"--source={npz}") == 0
    assert "41 transitions" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_errors_leave_a_report_but_no_partial_data_set(tmp_path, capsys):
    table = table_of(record())
    table["rewards"][10] = np.nan
    np.savez(tmp_path / "a.npz", **table)
    assert import_(f"--source=npz:{tmp_path}/a.npz", f"--output={tmp_path}/set") == 2
    captured = capsys.readouterr()
    assert "error       reward is not finite (1 episode: 3)" in captured.out
    assert re.search(r"alfish import: .*1 of 11 episodes.*drop_episode", captured.err)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    assert import_(f"--source=npz:{tmp_path}/a.npz", f"--output={tmp_path}/set", "--policy=drop_episode") == 0
    kept = [episode for episode in record() if episode.id != "3"]
    assert_rows(OfflineBuffer([f"alfish:{tmp_path}/set"], spaces=SPACES), kept)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "--source is missing"),
        (["--source=nonsense:x"], "no scheme 'nonsense'"),
        (["--source=npz:nothing.npz"], "there is no file nothing.npz"),
        (["--source=npz:nothing.npz", "--policy=ignore"], "policy"),
        (["--source=npz:nothing.npz", "--env_id=CartPol-v1"], "close ones are CartPole"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(arguments, words, capsys):
    assert import_(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_data_of_another_environment_are_refused_and_both_are_named(npz, capsys):
    assert import_(f"--source={npz}", "--env_id=CartPole-v1") == 2
    assert "observation has shape [3] in each step, but [4] is expected" in capsys.readouterr().err


def test_vector_rewards_for_an_environment_of_one_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(gymnasium.registry, "Stamped-v0", EnvSpec("Stamped-v0", Stamped))
    table = table_of(record())
    np.savez(tmp_path / "a.npz", **table | {"rewards": np.stack([table["rewards"]] * 2, 1)})
    assert import_(f"--source=npz:{tmp_path}/a.npz", "--env_id=Stamped-v0", f"--output={tmp_path}/set") == 2
    assert "have 2 entries, but the environment's rewards are scalars" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_a_run_with_memory_is_read_too(tmp_path):
    memory = "Torso.memory = @GRU\nGRU.size = 4\nReplayBatches.state_period = 4\nReplayBatches.window_length = 3\n"
    name = trained(tmp_path, TOY + memory + STAMPED.format(truncates=False, steps=40))
    assert sum(episode.length for episode in open_source(name, SPACES).episodes()) > 20
