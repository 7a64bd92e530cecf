"""LeRobot's directories, written here with pyarrow as version 3 lays them out: several episodes a file."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from recorded import BOX_SPACES, SPACES, assert_rows, record, unstretched, without_final

from alfish.errors import UsageError
from alfish.offline import OfflineBuffer, Spaces, limits, open_source

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra 'arrow'")
parquet = pytest.importorskip("pyarrow.parquet")


def written(root, episodes, rows_a_file=17, **more_features):
    """A row a frame; an episode's final observation is nowhere."""
    columns = {
        "observation.state": [row for e in episodes for row in e.observations[:-1].tolist()],
        "action": [row for e in episodes for row in e.actions.tolist()],
        "next.reward": np.concatenate([e.rewards for e in episodes]),
        "next.done": np.concatenate([e.terminated | e.truncated for e in episodes]),
        "episode_index": np.concatenate([np.full(e.length, int(e.id)) for e in episodes]),
        "frame_index": np.concatenate([np.arange(e.length) for e in episodes]),
    }
    features = {
        "observation.state": {"dtype": "float32", "shape": [3]},
        "action": {"dtype": "float32", "shape": list(episodes[0].actions.shape[1:]) or [1]},
        **{name: {"dtype": "float32", "shape": [1]} for name in ("next.reward", "next.done", "episode_index")},
        **more_features,
    }
    (root / "meta").mkdir(parents=True)
    (root / "data" / "chunk-000").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps({"codebase_version": "v3.0", "features": features}))
    table = pyarrow.table(columns)
    for number, start in enumerate(range(0, len(table), rows_a_file)):
        parquet.write_table(table.slice(start, rows_a_file), root / "data/chunk-000" / f"file-{number:03d}.parquet")
    return f"lerobot:{root}"


def truncated(episodes):
    """Nobody says which terminated."""
    return [e._replace(terminated=e.terminated & False, truncated=e.terminated | e.truncated) for e in episodes]


@pytest.mark.parametrize("rows_a_file", [1000, 17, 3])
@pytest.mark.parametrize("continuous", [False, True])
def test_the_last_frame_is_the_final_observation(tmp_path, rows_a_file, continuous):
    of, canonical = (BOX_SPACES, unstretched) if continuous else (SPACES, lambda actions: actions)
    episodes = record(continuous=continuous)
    name = written(tmp_path / "set", episodes, rows_a_file)
    buffer = OfflineBuffer([name], spaces=of)
    assert_rows(buffer, without_final(truncated(episodes)), canonical)
    assert "its last frame is its final observation" in buffer.report.sentences("note", 9)
    assert "next.done does not say whether an episode terminated" in buffer.report.sentences("warning", 9)


def with_success(name, episodes):
    """Adds `next.success` to the only file, and to what `meta/info.json` declares."""
    changed(name, lambda columns: columns.update({"next.success": np.concatenate([e.terminated for e in episodes])}))
    declare(name, features={"next.success": {"dtype": "bool", "shape": [1]}})


def declare(name, features=None, **counts):
    info = Path(name.partition(":")[2]) / "meta/info.json"
    about = json.loads(info.read_text())
    about["features"] |= features or {}
    info.write_text(json.dumps(about | counts))


def test_successful_episodes_terminate_with_their_last_reward(tmp_path):
    sparse = [e._replace(rewards=e.rewards * e.terminated) for e in record()]
    name = written(tmp_path / "set", sparse, 1000)
    with_success(name, sparse)
    buffer = OfflineBuffer([name], spaces=SPACES)
    assert_rows(buffer, without_final(sparse))
    assert [e.return_ > 0 for e in buffer.episodes] == [bool(e.terminated[-1]) for e in without_final(sparse)]
    assert "next.done" not in buffer.report.sentences("warning", 9)


@pytest.mark.parametrize("dones", ["terminated", "truncated"])
def test_the_user_must_specify_the_meaning_of_done(tmp_path, dones):
    episodes = record()
    name = written(tmp_path / "set", episodes)
    buffer = OfflineBuffer([f"{name}?dones={dones}"], spaces=SPACES)
    ends = [e.terminated | e.truncated for e in episodes]
    as_said = [
        e._replace(terminated=end & (dones == "terminated"), truncated=end & (dones == "truncated"))
        for e, end in zip(episodes, ends)
    ]
    assert_rows(buffer, without_final(as_said))
    assert "next.done" not in buffer.report.sentences("warning", 9)


def test_a_frame_after_the_end_is_the_final_observation(tmp_path):
    """As LeRobot's evaluations record: the other columns of that frame repeat those before."""
    name = written(tmp_path / "set", record(), 1000)
    with_success(name, record())
    padded = {key: [] for key in ("observation.state", "action", "next.reward", "next.done", "next.success")}
    padded |= {"episode_index": [], "frame_index": []}

    def pad(columns):
        start = 0
        for e in record():
            for key, values in columns.items():
                part = values[start : start + e.length]
                last = e.observations[-1].tolist() if key == "observation.state" else part[-1]
                padded[key] += [*part, e.length if key == "frame_index" else last]
            start += e.length
        columns |= padded

    changed(name, pad)
    assert_rows(OfflineBuffer([name], spaces=SPACES), record())


def test_dropping_the_only_rewarded_step_is_reported(tmp_path):
    episodes = [e._replace(rewards=e.rewards * (e.terminated | e.truncated)) for e in record()]
    report = OfflineBuffer([written(tmp_path / "set", episodes)], spaces=SPACES).report
    assert "truncated episodes lose their only reward, because their last step is dropped" in report.sentences(
        "warning", 9
    )


def set_index(row, value):
    def change(columns):
        columns["episode_index"] = [float(i) for i in columns["episode_index"]]
        columns["episode_index"][row] = value

    return change


@pytest.mark.parametrize(
    "row, value, words, lost",
    [  # rows 3 to 7 are episode 1, row 8 is episode 2
        (4, float("nan"), "episode_index is nan, but an integer of at least 0 is expected", {"1"}),
        (4, 1 + 2.0**40, r"meta/info.json declares 11 episodes, numbered from 0", {"1"}),
        (4, 2.0, "its frames are not contiguous: its episode_index appears in 2 places", {"1", "2"}),
        (4, 1.5, "episode_index is 1.5", {"1"}),
        (7, 2.0, "it has 4 frames, but meta/episodes", {"1", "2"}),
        (8, 1.0, "it is not there", {"1", "2"}),
    ],
)
@pytest.mark.parametrize("version", [2, 3])
def test_an_episode_whose_index_is_damaged_is_left_out(tmp_path, row, value, words, lost, version):
    episodes = record()
    name = written(tmp_path / "set", episodes, 1000)
    declare(name, total_episodes=11, total_frames=41)
    meta, lengths = tmp_path / "set/meta", [e.length for e in episodes]
    if version == 2:
        lines = [json.dumps({"episode_index": i, "length": length}) for i, length in enumerate(lengths)]
        (meta / "episodes.jsonl").write_text("\n".join(lines))
    else:
        (meta / "episodes/chunk-000").mkdir(parents=True)
        table = pyarrow.table({"episode_index": range(11), "length": lengths})
        parquet.write_table(table, meta / "episodes/chunk-000/file-000.parquet")
    OfflineBuffer([name], spaces=SPACES)
    changed(name, set_index(row, value))
    with pytest.raises(UsageError, match=words):
        OfflineBuffer([name], spaces=SPACES)
    buffer = OfflineBuffer([name], spaces=SPACES, policy="drop_episode")
    kept = [e for e in episodes if e.id not in lost]
    assert_rows(buffer, without_final(truncated(kept)))


@pytest.mark.parametrize("line", ["{", "1", '{"length": 3}', '{"episode_index": 0, "length": null}'])
def test_damaged_lengths_of_episodes_are_named(tmp_path, line):
    name = written(tmp_path / "set", record())
    (tmp_path / "set/meta/episodes.jsonl").write_text(f"{line}\n")
    with pytest.raises(UsageError, match="set/meta does not have the length of each episode"):
        OfflineBuffer([name], spaces=SPACES)


def test_counts_that_meta_declares_are_compared(tmp_path):
    name = written(tmp_path / "set", record())
    declare(name, total_episodes=12, total_frames=50)
    with pytest.raises(UsageError, match=r"it is not there \(1 episode: 11\)"):
        OfflineBuffer([name], spaces=SPACES)
    report = OfflineBuffer([name], spaces=SPACES, policy="drop_episode").report
    assert "meta/info.json declares 50 frames, but there are 41" in report.sentences("warning", 9)
    declare(name, total_episodes=10**12)
    with pytest.raises(UsageError, match="declares 1,000,000,000,000 episodes, but there are only 41 frames"):
        OfflineBuffer([name], spaces=SPACES)
    declare(name, total_episodes="many")
    with pytest.raises(UsageError, match="meta/info.json does not declare its features and counts"):
        open_source(name)


@pytest.mark.parametrize(
    "options, words",
    [
        ("dones=both", "has dones=both; it must be terminated or truncated"),
        ("ends=truncated", "has the option 'ends', but lerobot: supports dones"),
    ],
)
def test_an_option_that_is_unknown_is_named(tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        open_source(f"lerobot:{tmp_path}?{options}")


def test_an_option_for_missing_flags_is_refused(tmp_path):
    name = written(tmp_path / "set", record(), 1000)
    info = tmp_path / "set/meta/info.json"
    about = json.loads(info.read_text())
    del about["features"]["next.done"]
    info.write_text(json.dumps(about))
    with pytest.raises(UsageError, match="has no next.done, to which the option dones=truncated refers"):
        open_source(f"{name}?dones=truncated")


def test_several_observations_are_a_dict_and_films_are_left_out(tmp_path):
    film = {"observation.images.top": {"dtype": "video", "shape": [96, 96, 3]}}
    name = written(tmp_path / "set", record(), 1000, **film)
    (path,) = (tmp_path / "set").glob("data/**/*.parquet")
    table = parquet.read_table(path)
    parquet.write_table(table.append_column("observation.more", table.column("observation.state")), path)
    info = tmp_path / "set/meta/info.json"
    about = json.loads(info.read_text())
    about["features"]["observation.more"] = {"dtype": "float32", "shape": [3]}
    info.write_text(json.dumps(about))
    of = Spaces(spaces.Dict(state=SPACES.observation, more=SPACES.observation), SPACES.action)
    buffer = OfflineBuffer([name], spaces=of)
    seen = buffer.sample(50).experience.time_step.observation
    assert (seen["state"] == seen["more"]).all()
    assert "videos are not read: observation.images.top" in buffer.report.sentences("note", 9)


def test_a_truncated_file_is_named_and_others_are_read(tmp_path):
    name = written(tmp_path / "set", record(), rows_a_file=9)  # episodes 0 to 2, 3, ...
    files = sorted((tmp_path / "set").glob("data/**/*.parquet"))
    files[1].write_bytes(files[1].read_bytes()[: files[1].stat().st_size // 2])
    with pytest.raises(UsageError, match=rf"{files[1].name}.*{len(files) - 1} other files of the data set are present"):
        OfflineBuffer([name], spaces=SPACES)
    buffer = OfflineBuffer([name], spaces=SPACES, policy="drop_episode")
    kept = without_final(truncated(record()))
    assert {stored.id for stored in buffer.episodes} < {episode.id for episode in kept}


@pytest.mark.parametrize("lost", range(1, 13))
def test_rows_around_a_lost_file_are_not_joined(tmp_path, lost):
    name = written(tmp_path / "set", record(), rows_a_file=3)
    sorted((tmp_path / "set").glob("data/**/*.parquet"))[lost].write_bytes(b"nothing")
    rows = 0
    for episode in open_source(name).episodes():
        if not hasattr(episode, "reason"):
            steps = episode.observations[:, 2]
            assert (np.diff(steps) == 1).all() and episode.rewards.tolist() == steps[1:].tolist()
            rows += len(steps)
    assert rows == 41 - 3


def changed(name, change):
    """Rewrites the only file's columns."""
    (path,) = Path(name.partition(":")[2]).glob("data/**/*.parquet")
    columns = parquet.read_table(path).to_pydict()
    change(columns)
    parquet.write_table(pyarrow.table(columns), path)


def reverse(columns):
    columns["frame_index"][:3] = columns["frame_index"][2::-1]


def skip(columns):
    for name in columns:
        del columns[name][4]  # the second frame of episode 1


def recut(columns):
    columns["observation.state"][0].append(columns["observation.state"][1].pop(0))


def wide(columns):
    columns["observation.state"] = [[row[:2], row[1:]] for row in columns["observation.state"]]


@pytest.mark.parametrize(
    "change, words",
    [
        (reverse, r"out of order: frame_index goes from 2 to 1 \(1 episode: 0\)"),
        (skip, r"frames are missing or out of order: frame_index goes from 0 to 2 \(1 episode: 1\)"),
        (recut, r"its lists have 2 to 4 entries, but \[3\] is declared"),
        (wide, r"its lists have shape \[2, 2\], but \[3\] is declared"),
    ],
)
def test_unexpected_frames_and_lists_are_named(tmp_path, change, words):
    name = written(tmp_path / "set", record(), 1000)
    changed(name, change)
    with pytest.raises(UsageError, match=words):
        OfflineBuffer([name], spaces=SPACES)


def test_an_episode_whose_first_frames_are_missing_is_reported(tmp_path):
    name = written(tmp_path / "set", record(), 1000)
    changed(name, lambda columns: [values.pop(0) for values in columns.values()])
    report = OfflineBuffer([name], spaces=SPACES).report
    assert "episode 0 begins with frame 1: the earlier frames are missing" in report.sentences("warning")


def test_rows_that_only_a_declaration_has_are_refused(tmp_path):
    """A value that repeats takes no room in parquet."""
    name = written(tmp_path / "set", record(), 1000)
    info = tmp_path / "set/meta/info.json"
    about = json.loads(info.read_text())
    about["features"]["observation.state"]["shape"] = [10**8]
    info.write_text(json.dumps(about))
    with pytest.raises(
        UsageError, match=r"file-000.parquet .*declares 32.8 GB of uncompressed content, but the file has only"
    ):
        OfflineBuffer([name], spaces=SPACES)


def test_lists_longer_than_declared_count_before_they_are_read(tmp_path, monkeypatch):
    name = written(tmp_path / "set", record(), 1000)
    [path] = (tmp_path / "set/data").glob("*/*.parquet")
    table = parquet.read_table(path)
    column = pyarrow.array([[0.0] * 200_000] * len(table))
    parquet.write_table(table.set_column(0, "observation.state", column), path)
    monkeypatch.setattr(limits, "SMALL", 1000)
    with pytest.raises(
        UsageError, match=r"file-000.parquet .*declares 65.6 MB of uncompressed content, but the file has only"
    ):
        OfflineBuffer([name], spaces=SPACES)


def test_an_empty_file_among_others_is_left_out(tmp_path):
    name = written(tmp_path / "set", record())
    first, second, *_ = sorted((tmp_path / "set/data").glob("*/*.parquet"))
    parquet.write_table(parquet.read_table(first).slice(0, 0), second.with_name("file-000-empty.parquet"))
    assert_rows(OfflineBuffer([name], spaces=SPACES), without_final(truncated(record())))


def test_pipes_are_named_and_not_read(tmp_path):
    name = written(tmp_path / "set", record())
    path = sorted((tmp_path / "set").glob("data/**/*.parquet"))[0]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match=f"{path} is a pipe"):
        OfflineBuffer([name], spaces=SPACES)
    (tmp_path / "set/meta/info.json").unlink()
    os.mkfifo(tmp_path / "set/meta/info.json")
    with pytest.raises(UsageError, match="info.json is a pipe"):
        open_source(name)


def test_a_clone_without_git_lfs_is_named(tmp_path):
    name = written(tmp_path / "set", record())
    for path in (tmp_path / "set/data").glob("*/*.parquet"):
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")
    with pytest.raises(UsageError, match="file-000.parquet is a Git LFS pointer"):
        open_source(name)


def test_what_is_missing_is_named(tmp_path):
    name = written(tmp_path / "set", record())
    for path in (tmp_path / "set").glob("data/**/*.parquet"):
        path.unlink()
    with pytest.raises(UsageError, match=r"there is no data/\*\*/\*.parquet"):
        open_source(name)
    (tmp_path / "set/meta/info.json").write_text("{}")
    with pytest.raises(UsageError, match="meta/info.json does not declare its features"):
        open_source(name)
    (tmp_path / "set/meta/info.json").unlink()
    with pytest.raises(UsageError, match="is not a LeRobot data set: there is no meta/info.json; it holds data, meta"):
        open_source(name)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file, but a LeRobot data set is a directory"):
        open_source(f"lerobot:{tmp_path}/file")
