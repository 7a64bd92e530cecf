"""The sources that need no other library: .npz files, what `alfish import` writes, and how sources are named."""

import json
import os
import zipfile

import numpy as np
import pytest
import torch
from absl import logging
from data_sets import written
from gymnasium import spaces
from recorded import BOX_SPACES, SPACES, assert_rows, record, source, table_of, unstretched, without_final

from alfish.__main__ import main
from alfish.errors import RunError, UsageError
from alfish.offline import (
    Arrays,
    DataSetWriter,
    Episode,
    EpisodeSource,
    OfflineBuffer,
    SourceReading,
    Spaces,
    limits,
    open_source,
)
from alfish.offline import data_set as data_set_module
from alfish.offline import data_set as writer_module
from alfish.offline.recorded_spaces import from_json, to_json
from alfish.offline.sources import SCHEMES, flat, npz, source_files
from alfish.runs import checkpoints
from alfish.runs.checkpoints import Checkpoints

DICT_SPACES = Spaces(spaces.Dict(here=SPACES.observation, there=SPACES.observation), SPACES.action)


def buffer_of(*sources, of=SPACES, **options):
    return OfflineBuffer(list(sources), spaces=of, **options)


# npz


@pytest.mark.parametrize("continuous", [False, True])
def test_npz_of_whole_episodes(tmp_path, continuous):
    episodes = record(continuous=continuous)
    parts = table_of(episodes, next_observations=False)
    parts["observations"] = np.concatenate([e.observations for e in episodes])
    np.savez(tmp_path / "a.npz", lengths=np.array([e.length for e in episodes]), **parts)
    of, canonical = (BOX_SPACES, unstretched) if continuous else (SPACES, lambda actions: actions)
    assert_rows(buffer_of(f"npz:{tmp_path}/a.npz", of=of), episodes, canonical)


def test_npz_with_a_flag_an_episode(tmp_path):
    episodes = record()
    parts = table_of(episodes, next_observations=False) | {
        "observations": np.concatenate([e.observations for e in episodes]),
        "terminated": np.array([e.terminated[-1] for e in episodes]),
    }
    del parts["truncated"]
    np.savez(tmp_path / "a.npz", lengths=np.array([e.length for e in episodes]), **parts)
    assert_rows(buffer_of(f"npz:{tmp_path}/a.npz"), episodes)


def test_npz_table_with_next_observations(tmp_path, block_rows):
    np.savez(tmp_path / "a.npz", **table_of(record()))
    assert_rows(buffer_of(f"npz:{tmp_path}/a.npz"), record())


def test_npz_table_without_next_observations_invents_no_final_one(tmp_path, block_rows):
    np.savez(tmp_path / "a.npz", **table_of(record(), next_observations=False))
    buffer = buffer_of(f"npz:{tmp_path}/a.npz")
    assert_rows(buffer, without_final(record()))
    assert "final observations were not recorded" in buffer.report.sentences("note")


def test_large_rows_are_read_a_few_at_a_time(monkeypatch):
    images = np.zeros((50, 8, 8), np.uint8)
    images[20:, 0, 0] = 1
    arrived = np.concatenate([images[1:], images[-1:]])
    arrived[19, 0, 0] = 0  # not the image that row 20 has
    never = np.zeros(50, bool)
    table = flat.TransitionTable(images, never, np.zeros(50), never, None, arrived)
    monkeypatch.setattr(flat, "BLOCK_BYTES", 7 * 64)
    read, whole = [], flat.read_rows
    monkeypatch.setattr(
        flat, "read_rows", lambda stored, rows: read.append(rows.stop - rows.start) or whole(stored, rows)
    )
    ends, num_unmarked = flat.cut(table)
    assert ends.tolist() == [20, 50] and num_unmarked == 2 and max(read) == 7


def test_a_table_is_split_where_observations_are_not_continuous(tmp_path, block_rows):
    table = table_of(record())
    table["terminated"][:] = table["truncated"][:] = False  # nobody says where episodes end
    np.savez(tmp_path / "a.npz", **table)
    never = np.zeros(99, bool)
    episodes = [e._replace(terminated=never[: e.length], truncated=e.terminated | e.truncated) for e in record()]
    buffer = buffer_of(f"npz:{tmp_path}/a.npz")
    assert_rows(buffer, episodes)
    assert "11 episodes end without a flag" in buffer.report.sentences("note")
    assert buffer.report.found("mended") == {}


def test_npz_nests_are_names_with_slashes(tmp_path):
    table = table_of(record())
    for name in ("observations", "next_observations"):
        whole = table.pop(name)
        table |= {f"{name}/here": whole, f"{name}/there": whole + 1}
    np.savez(tmp_path / "a.npz", **table)
    observation = buffer_of(f"npz:{tmp_path}/a.npz", of=DICT_SPACES).sample(50).experience.time_step.observation
    assert (observation["here"] + 1 == observation["there"]).all()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rewards": None}, "has no rewards: its arrays must be named observations"),
        ({"dones": np.zeros(3)}, "has dones, which is not read"),
        ({"rewards": np.zeros(5)}, r"observations has 41 rows but rewards has 5"),
        ({"actions": np.array([{}] * 41)}, "actions cannot be read; .*not Python objects"),
        ({"lengths": np.array([3, 4])}, "with lengths, observations already contain the next observations"),
        ({"rewards": np.float64(3)}, r"rewards has shape \[\], but \[N, ...\]"),
        ({"rewards": np.array(["one"] * 41)}, "rewards has dtype <U3, but numbers are expected"),
        (
            {"next_observations": np.zeros((41, 2))},
            r"next_observations has shape \[41, 2\], but \[41, 3\], as in observations, is expected",
        ),
        (
            {"next_observations": None, "next_observations/a": np.zeros((41, 3))},
            "next_observations are a, but one array, as for observations, is expected",
        ),
        ({"terminated": np.zeros((41, 2))}, r"terminated has shape \[41, 2\], but \[N\]"),
        ({"terminated": np.zeros(())}, r"terminated has shape \[\], but \[N, ...\]"),
        ({"truncated": np.full(41, 0.5)}, "truncated has 0.5, but a flag must be 0 or 1"),
        ({"truncated": np.array(["no"] * 41)}, "truncated has dtype <U2, but numbers are expected"),
        ({"observations/a": np.zeros((41, 3))}, "has observations and observations/a; write one of them under"),
        ({"rewards/a": np.zeros(41)}, "has rewards, rewards/a, but rewards must be a single array"),
    ],
)
def test_an_npz_that_is_something_else_is_named(tmp_path, change, words):
    arrays = table_of(record()) | change
    np.savez(tmp_path / "a.npz", **{name: value for name, value in arrays.items() if value is not None})
    with pytest.raises(UsageError, match=words) as error:
        buffer_of(f"npz:{tmp_path}/a.npz")
    assert "allow_pickle" not in str(error.value)


@pytest.mark.parametrize(
    "lengths, words",
    [
        (np.full((11, 1), 3), r"lengths has shape \[11, 1\], but \[E\], one number for each episode, is expected"),
        (np.array(41), r"lengths has shape \[\], but \[E\]"),
        (np.array([42, -1]), "lengths has -1, but a number of transitions must be 0 or more"),
        (np.array([20.5, 20.5]), "lengths has dtype float64, but integers are expected"),
    ],
)
def test_npz_lengths_are_a_whole_number_for_each_episode(tmp_path, lengths, words):
    np.savez(tmp_path / "a.npz", lengths=lengths, **table_of(record(), next_observations=False))
    with pytest.raises(UsageError, match=words):
        buffer_of(f"npz:{tmp_path}/a.npz")


def test_npz_of_one_number_for_all_actions_is_named(tmp_path):
    parts = table_of(record(), next_observations=False) | {"observations": np.zeros((52, 3)), "actions": np.array(1)}
    np.savez(tmp_path / "a.npz", lengths=np.array([e.length for e in record()]), **parts)
    with pytest.raises(UsageError, match=r"actions has shape \[\], but \[N, ...\]"):
        buffer_of(f"npz:{tmp_path}/a.npz")


@pytest.mark.parametrize("write, words", [(np.save, "is a single array, but an .npz file with several"),
                                          (np.savetxt, "is not an .npz file; write one with numpy.savez")])  # fmt: skip
def test_a_file_that_only_ends_in_npz_is_named(tmp_path, write, words):
    with open(tmp_path / "a.npz", "wb") as file:
        write(file, np.zeros(3))
    with pytest.raises(UsageError, match=words) as error:
        open_source(f"npz:{tmp_path}/a.npz")
    assert "allow_pickle" not in str(error.value)


def test_a_table_without_resets_gives_a_warning(tmp_path):
    table = table_of(record(), next_observations=False)
    del table["truncated"]
    np.savez(tmp_path / "a.npz", **table)
    report = buffer_of(f"npz:{tmp_path}/a.npz").report
    assert "transitions across resets are trained on; give truncated" in report.sentences("warning")


def test_npz_lengths_must_add_up(tmp_path):
    parts = table_of(record(), next_observations=False)
    np.savez(tmp_path / "a.npz", lengths=np.array([e.length for e in record()]), **parts)
    with pytest.raises(UsageError, match="observations has 41 rows, but the array of lengths requires 52"):
        buffer_of(f"npz:{tmp_path}/a.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("lengths", [False, True])
def test_an_npz_is_read_some_rows_at_a_time(tmp_path, monkeypatch, save, lengths):
    """Arrays that were written transposed are read whole."""
    monkeypatch.setattr(flat, "BLOCK_ROWS", 7)
    monkeypatch.setattr(source_files.blocks, "__defaults__", (0, 7))
    monkeypatch.setattr(npz, "CHUNK_BYTES", 50)
    sizes, table = [], table_of(record(), next_observations=not lengths)
    if lengths:
        table["observations"] = np.concatenate([e.observations for e in record()])
        table["lengths"] = np.array([e.length for e in record()])
    save(tmp_path / "a.npz", **table)
    monkeypatch.setattr(npz, "check_memory", lambda num_bytes, name: sizes.append(num_bytes))
    assert_rows(buffer_of(f"npz:{tmp_path}/a.npz"), record())
    assert max(sizes) <= 11 * table["observations"][0].nbytes < table["observations"].nbytes / 3
    table["observations"] = np.asfortranarray(table["observations"])
    save(tmp_path / "a.npz", **table)
    assert_rows(buffer_of(f"npz:{tmp_path}/a.npz"), record())


@pytest.mark.parametrize("row", [0, -1])
def test_an_npz_whose_checksum_is_wrong_is_refused_as_a_whole(tmp_path, row, block_rows):
    table = table_of(record() * 60)  # more than zipfile reads at a time
    np.savez(tmp_path / "a.npz", **table)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[content.index(table["rewards"].tobytes()) + row % table["rewards"].nbytes] ^= 1
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UsageError, match=r"^/.*a.npz: rewards cannot be read \(Bad CRC-32"):
        buffer_of(f"npz:{tmp_path}/a.npz", policy="drop_episode")


def test_an_npz_with_fewer_numbers_than_declared_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", **table_of(record()))
    with zipfile.ZipFile(tmp_path / "a.npz") as before:
        parts = {name: before.read(name).replace(b"(41, 3)", b"(99, 3)") for name in before.namelist()}
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as after:
        for name, part in parts.items():
            after.writestr(name, part)
    with pytest.raises(
        UsageError, match=r"observations cannot be read \(only [\d,]+ of its [\d,]+ bytes are present\)"
    ):
        buffer_of(f"npz:{tmp_path}/a.npz")


# OGBench


def states_of(episodes):
    """Trajectories as OGBench stores them: a row for each state, the last one with an action that was not taken."""
    return {
        "observations": np.concatenate([e.observations for e in episodes]),
        "actions": np.concatenate([np.append(e.actions, e.actions[:1] * 0, 0) for e in episodes]),
        "terminals": np.concatenate([np.eye(1, e.length + 1, e.length)[0] for e in episodes]),
        "rewards": np.concatenate([np.append(e.rewards, 99) for e in episodes]),
        "qpos": np.zeros((3, 3)),
    }


@pytest.mark.parametrize("continuous", [False, True])
def test_episodes_of_ogbench_are_truncated_at_their_last_state(tmp_path, block_rows, continuous):
    episodes = record(continuous=continuous)
    of, canonical = (BOX_SPACES, unstretched) if continuous else (SPACES, lambda actions: actions)
    states = states_of(episodes)
    timed_out = [e._replace(terminated=e.terminated & False, truncated=e.terminated | e.truncated) for e in episodes]
    np.savez(tmp_path / "a.npz", **states)
    buffer = buffer_of(f"ogbench:{tmp_path}/a.npz", of=of)
    assert_rows(buffer, timed_out, canonical)
    states["terminals"][-1] = 0  # a trajectory that breaks off
    del states["rewards"]
    np.savez(tmp_path / "a.npz", **states)
    buffer = buffer_of(f"ogbench:{tmp_path}/a.npz", of=of)
    assert_rows(buffer, [e._replace(rewards=np.zeros_like(e.rewards)) for e in timed_out], canonical)
    assert "there are no rewards: all are 0" in buffer.report.sentences("note")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"terminals": None}, "has no terminals, so it is not an OGBench data set; it has actions, observations, qpos"),
        ({"masks": np.zeros(3)}, "has masks, which OGBench adds when it loads a data set; use the file as it was"),
        ({"actions": np.zeros((3, 2))}, "actions has 3 rows but rewards has 52"),
        ({"terminals": np.full(52, 0.5)}, "terminals has 0.5, but a flag must be 0 or 1"),
    ],
)
def test_an_npz_that_is_not_ogbenchs_is_named(tmp_path, change, words):
    states = states_of(record()) | change
    np.savez(tmp_path / "a.npz", **{name: value for name, value in states.items() if value is not None})
    with pytest.raises(UsageError, match=words):
        buffer_of(f"ogbench:{tmp_path}/a.npz")


def test_npz_refuses_a_file_of_ogbench_and_names_the_scheme_ogbench(tmp_path):
    np.savez(tmp_path / "a.npz", **states_of(record()))
    with pytest.raises(UsageError, match=f"write ogbench:{tmp_path}/a.npz if it is an OGBench data set"):
        open_source(f"npz:{tmp_path}/a.npz")


# alfish's own


@pytest.mark.parametrize("shard_bytes", [1, 200, 2**25])
@pytest.mark.parametrize("continuous", [False, True])
def test_what_is_written_is_read_again(tmp_path, monkeypatch, shard_bytes, continuous):
    monkeypatch.setattr(writer_module, "SHARD_BYTES", shard_bytes)
    of, canonical = (BOX_SPACES, unstretched) if continuous else (SPACES, lambda actions: actions)
    name = written(tmp_path / "set", record(continuous=continuous), of)
    buffer = OfflineBuffer([name])
    assert buffer.spaces == of
    assert_rows(buffer, record(continuous=continuous), canonical)
    assert [stored.id for stored in buffer.episodes] == [str(k) for k in range(11)]


def test_episodes_of_transposed_arrays_and_any_ids_are_read_again(tmp_path):
    ids = iter(["a\tb", "run\xa01", 7, *"abcdefgh"])
    turned = [e._replace(id=next(ids), observations=np.asfortranarray(e.observations)) for e in record()]
    buffer = OfflineBuffer([written(tmp_path / "set", turned)])
    assert_rows(buffer, record())
    assert [stored.id for stored in buffer.episodes][:3] == ["a b", "run 1", "7"]


def test_a_data_set_appears_when_it_is_whole(tmp_path):
    with pytest.raises(RuntimeError), DataSetWriter(tmp_path / "set", SPACES) as writer:
        writer.add(record()[0])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_is_named_and_no_file_is_left(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(data_set_module, "write_atomically", fails)
    with pytest.raises(
        RunError, match="set cannot be written .No space left on device.; the unfinished files were removed"
    ):
        written(tmp_path / "set", record())
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_is_not_written_over_another(tmp_path):
    written(tmp_path / "set", record())
    with pytest.raises(UsageError, match="is not empty"):
        DataSetWriter(tmp_path / "set", SPACES)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        DataSetWriter(tmp_path / "file", SPACES)


@pytest.mark.parametrize("directory", [".", ""])
def test_a_data_set_needs_a_directory_with_a_name(tmp_path, monkeypatch, directory):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="choose a new directory"):
        DataSetWriter(directory, SPACES)


def test_a_damaged_file_is_named_and_only_its_episodes_are_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "SHARD_BYTES", 200)
    name = written(tmp_path / "set", record())
    shards = sorted((tmp_path / "set" / "episodes").iterdir())
    assert len(shards) > 2
    shards[1].write_bytes(shards[1].read_bytes()[: shards[1].stat().st_size // 2])
    with pytest.raises(UsageError, match=rf"{shards[1].name} is truncated.*; {len(shards) - 1} other files"):
        OfflineBuffer([name])
    buffer = OfflineBuffer([name], policy="drop_episode")
    lost = {int(id) for ids in buffer.report.found("error").values() for id in ids}
    assert 0 < len(lost) < 11
    assert_rows(buffer, [episode for k, episode in enumerate(record()) if k not in lost])


def test_a_damaged_index_is_named(tmp_path):
    name = written(tmp_path / "set", record())
    index = tmp_path / "set" / "data_set.json"
    content = index.read_text()
    index.write_text(content[: len(content) // 2])
    with pytest.raises(UsageError, match="data_set.json is damaged"):
        open_source(name)
    index.write_text(json.dumps(json.loads(content) | {"format": 99}))
    with pytest.raises(UsageError, match="format 99"):
        open_source(name)
    index.unlink()
    with pytest.raises(UsageError, match="has no data_set.json"):
        open_source(name)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3,), np.float32),
        spaces.Box(np.array([-np.inf, 0.1]), np.array([np.inf, 0.3]), (2,), np.float64),
        spaces.Box(0, 255, (4, 4, 3), np.uint8),
        spaces.Box(0, 1, (), np.float32),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([3, 3], dtype=np.int32),
        spaces.MultiDiscrete([2, 3], start=[1, 0]),
        spaces.MultiBinary((2, 3)),
        spaces.MultiBinary(4),
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.MultiBinary(2), spaces.Box(0, 1, (1,))])),
        None,
    ],
    ids=str,
)
def test_spaces_survive_json(space):
    again = from_json(json.loads(json.dumps(to_json(space), allow_nan=False)))
    assert again == space
    if isinstance(space, spaces.Box):
        assert again.dtype == space.dtype and (again.low == space.low).all() and (again.high == space.high).all()


# Names


@pytest.mark.parametrize(
    "name, words",
    [
        ("minary:a/b-v0", "no scheme 'minary'; did you mean minari:"),
        ("h5:a.h5", "no scheme 'h5'"),
        ("data/mine.npz", "has no scheme; if its suffix is right, write npz:data/mine.npz"),
        ("hopper", "'hopper' has no scheme.* minari:mujoco/hopper/expert-v0"),
        ("npz:", "a scheme without a path; an example is npz:mine.npz"),
        ("hopper", "docs/offline.md, 'Another format', shows how to read other data"),
        ("robomimic:lift.hdf5", "robomimic's HDF5 files are not read by alfish; docs/offline.md.* npz:FILE with h5py"),
        ("rlds:bridge", r"RLDS data sets \(TFRecord\) are not read .* with tensorflow_datasets"),
        ("data/bridge.tfrecord-00000-of-00512", r"RLDS data sets \(TFRecord\) are not read"),
        ("torchrl:dir", "TorchRL's memory-mapped data sets are not read .* with tensordict"),
        ("tianshou:b.hdf5", "Tianshou's HDF5 buffers are not read"),
        ("rllib:out.json", "RLlib's JSON files are not read .* with ray"),
        ("data/output-0.json", "RLlib's JSON files are not read"),
        ("parquet:rows", "tables of rows are not read .* with pandas"),
        ("rows.csv", "tables of rows are not read"),
    ],
)
def test_a_missing_source_is_refused_with_existing_names(name, words):
    with pytest.raises(UsageError, match=words):
        open_source(name)


def test_a_directory_of_ours_without_its_scheme_is_recognised(tmp_path):
    written(tmp_path / "set", record())
    with pytest.raises(UsageError, match=f"write alfish:{tmp_path}/set"):
        open_source(f"{tmp_path}/set")


@pytest.mark.parametrize(
    "content, words",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer.* `git lfs pull`"),
        (b"<!DOCTYPE html>\n<html>", "is an HTML page, which a server sent instead of the file; check the address"),
        (b"\n <HTML><head>", "is an HTML page"),
        (b"\x1f\x8b\x08\x00", "is compressed with gzip; unpack it with `gunzip`"),
        (b"BZh91AY", "is compressed with bzip2; unpack it with `bunzip2`"),
        (b"\xfd7zXZ\x00", "is compressed with xz; unpack it with `unxz`"),
        (b"\x28\xb5\x2f\xfd\x00", "is compressed with zstd; unpack it with `unzstd`"),
    ],
)
def test_other_files_instead_of_data_are_named(tmp_path, content, words):
    (tmp_path / "file").write_bytes(content)
    for scheme in FILES:
        with pytest.raises(UsageError, match=f"^{tmp_path}/file {words}"):
            open_source(f"{scheme}:{tmp_path}/file")


def test_files_of_other_libraries_are_recognized_by_suffix(tmp_path):
    for scheme in FILES:
        for name, words in (("rows.parquet", "tables of rows"), ("a.tfrecord-0", "RLDS"), ("out.json", "RLlib")):
            (tmp_path / name).write_bytes(b"PAR1")
            with pytest.raises(UsageError, match=f"{name} is not .*: {words}.* are not read by alfish"):
                open_source(f"{scheme}:{tmp_path}/{name}")


def test_a_directory_that_is_not_a_run_is_named(tmp_path):
    (tmp_path / "set/meta").mkdir(parents=True)
    with pytest.raises(UsageError, match="is not a run of `alfish train`; it holds meta"):
        open_source(f"run:{tmp_path}/set")
    (tmp_path / "set/meta/info.json").touch()
    for scheme in ("run", "alfish"):
        with pytest.raises(UsageError, match=f"; it is a LeRobot data set; write lerobot:{tmp_path}/set"):
            open_source(f"{scheme}:{tmp_path}/set")


def test_a_directory_that_another_scheme_reads_is_named(tmp_path):
    written(tmp_path / "set", record())
    with pytest.raises(UsageError, match=f"is one file; it is a data set of alfish; write alfish:{tmp_path}/set"):
        open_source(f"npz:{tmp_path}/set")
    (tmp_path / "rlds").mkdir()
    (tmp_path / "rlds/bridge-train.tfrecord-00000-of-00002").touch()
    with pytest.raises(UsageError, match=r"is one file; RLDS data sets \(TFRecord\) are not read"):
        open_source(f"d4rl:{tmp_path}/rlds")


FILES = ("npz", "ogbench", "d4rl", "d3rlpy", "sb3", "alf")


@pytest.mark.parametrize("scheme", FILES)
def test_a_directory_for_a_file_shows_what_is_in_it(tmp_path, scheme):
    (tmp_path / "inside.bin").touch()
    with pytest.raises(UsageError, match="is a directory, but .* is one file; it holds inside.bin"):
        open_source(f"{scheme}:{tmp_path}")


@pytest.mark.parametrize("scheme", FILES)
def test_a_file_that_is_missing_or_empty_is_named(tmp_path, scheme):
    (tmp_path / "other").touch()
    with pytest.raises(UsageError, match=r"there is no file .*nothing; .*in the same directory: other"):
        open_source(f"{scheme}:{tmp_path}/nothing")
    with pytest.raises(UsageError, match=r"there is no file .*nowhere does not exist either"):
        open_source(f"{scheme}:{tmp_path}/nowhere/nothing")
    with pytest.raises(UsageError, match="is an empty file"):
        open_source(f"{scheme}:{tmp_path}/other")


@pytest.mark.parametrize("scheme", ("alfish", "run"))
def test_a_file_for_a_directory_is_named(tmp_path, scheme):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file, but .* is a directory"):
        open_source(f"{scheme}:{tmp_path}/file")
    with pytest.raises(UsageError, match="there is no directory"):
        open_source(f"{scheme}:{tmp_path}/nowhere")


@pytest.mark.parametrize("scheme", ("npz", "sb3", "alf"))
def test_a_file_of_another_kind_is_refused(tmp_path, scheme):
    (tmp_path / "text").write_text("these are no data, but " * 100)
    with pytest.raises(UsageError, match=str(tmp_path)):
        open_source(f"{scheme}:{tmp_path}/text")


def test_an_npz_of_zeros_without_end_is_refused(tmp_path):
    zeros = np.broadcast_to(np.float32(0), (2**28,))  # 1 GB, in some 100 KB of deflated zeros of zeros
    np.savez(tmp_path / "a.npz", **table_of(record()))
    with zipfile.ZipFile(tmp_path / "a.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("lengths.npy", bytes(1000))
    content = (tmp_path / "a.npz").read_bytes()
    size = (1000).to_bytes(4, "little")
    (tmp_path / "a.npz").write_bytes(content.replace(size, zeros.nbytes.to_bytes(4, "little")))
    with pytest.raises(
        UsageError, match=f"{tmp_path}/a.npz declares 1.1 GB of uncompressed content, but the file has only .* KB"
    ):
        open_source(f"npz:{tmp_path}/a.npz")


def test_npz_lengths_whose_sum_overflows_are_refused(tmp_path):
    parts = table_of(record(), next_observations=False) | {"lengths": np.array([2**62] * 4)}
    np.savez(tmp_path / "a.npz", **parts)
    with pytest.raises(UsageError, match="the array of lengths requires 18,446,744,073,709,551,620"):
        buffer_of(f"npz:{tmp_path}/a.npz")


@pytest.mark.parametrize("scheme", FILES)
def test_irregular_files_are_named_and_not_read(tmp_path, scheme):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="pipe is a pipe, but data are read only from files"):
        open_source(f"{scheme}:{tmp_path}/pipe")
    with pytest.raises(UsageError, match="zero, which leads to /dev/zero, is a device, but data"):
        open_source(f"{scheme}:{tmp_path}/zero")


def test_pipes_in_a_directory_are_named_and_not_read(tmp_path):
    name = written(tmp_path / "set", record())
    (shard,) = (tmp_path / "set/episodes").iterdir()
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(UsageError, match="not a regular file"):
        OfflineBuffer([name])
    (tmp_path / "set/data_set.json").unlink()
    os.mkfifo(tmp_path / "set/data_set.json")
    with pytest.raises(UsageError, match="data_set.json is a pipe"):
        open_source(name)


def resaved(directory, change):
    """Changes the state of a data set's only file, whose checksum is right again."""
    checkpoints = Checkpoints(directory / "episodes")
    _, state = checkpoints.load(0)
    change(state)
    checkpoints.save(0, state)


def shared(depth=40):
    nested = torch.zeros(3)
    for _ in range(depth):
        nested = (nested, nested)
    return nested


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.clear(),
        lambda state: state.pop("observations"),
        lambda state: state.update(length=torch.tensor([2**62] * 11)),
        lambda state: state.update(length=torch.tensor([-1] * 11)),
        lambda state: state.update(length=state["length"].roll(1), terminated=state["terminated"][:5]),
        lambda state: state.update(rewards=torch.zeros(1).expand(41)),
        lambda state: state.update(rewards=torch.zeros(41).to_sparse()),
        lambda state: state.update(rewards="text"),
        lambda state: state.update(actions=state["actions"][:5]),
        lambda state: state.update(observations={"a": torch.zeros(())}),
        lambda state: state.update(ids=[1] * 11),
        lambda state: state.update(ids=["\x1b[2J"] * 11),
        lambda state: state.update(terminated=torch.full((11,), 0.3)),
        lambda state: state.update(terminated=torch.full((11,), torch.nan)),
        lambda state: state.update(terminated=torch.zeros(11, 2)),
    ],
)
def test_a_file_of_ours_with_other_content_is_named(tmp_path, change):
    name = written(tmp_path / "set", record())
    resaved(tmp_path / "set", change)
    with pytest.raises(UsageError, match=r"not readable: .*checkpoint-0+.pt"):
        OfflineBuffer([name])


def test_names_from_a_file_are_shortened_and_made_printable(tmp_path):
    name = written(tmp_path / "set", record())
    for key in ("\x1b]0;title\x07", "long" * 10_000):
        resaved(tmp_path / "set", lambda state, key=key: state.update(observations={key: torch.zeros(52, 3)}))
        with pytest.raises(UsageError, match="its observations are ") as error:
            list(SourceReading([name]))
        assert str(error.value).isprintable() and len(str(error.value)) < 3000
    np.savez(tmp_path / "a.npz", **{"unknown" * 1000: np.zeros(3)})
    (tmp_path / "a\x1b[2J\n.npz").write_bytes(b"no zip")
    for path in (tmp_path / "a.npz", tmp_path / "a\x1b[2J\n.npz"):
        with pytest.raises(UsageError, match=r"/a\W.*npz") as error:
            open_source(f"npz:{path}")
        assert str(error.value).isprintable() and len(str(error.value)) < 3000


def test_a_file_of_ours_may_share_parts_without_end(tmp_path, monkeypatch):
    name = written(tmp_path / "set", record())
    monkeypatch.setattr(checkpoints, "check_loadable", lambda *_: None)  # which walks over all leaves
    resaved(tmp_path / "set", lambda state: state.update(observations=shared()))
    with pytest.raises(UsageError, match="not readable: .*checkpoint-0+.pt"):
        OfflineBuffer([name])


BOX = {"type": "Box", "low": "0", "high": "1", "dtype": "float32"}


def test_an_index_cannot_declare_episodes_without_end(tmp_path):
    name = written(tmp_path / "set", record())
    index = tmp_path / "set/data_set.json"
    about = json.loads(index.read_text())
    index.write_text(json.dumps(about | {"num_episodes_of_file": [11, 10**12]}))
    with pytest.raises(UsageError, match=r"no checkpoint at 1 steps.*\(1 episode: 11 to 1000000000010\)"):
        OfflineBuffer([name])
    index.write_text(json.dumps(about | {"num_episodes_of_file": [10**12]}))
    report = OfflineBuffer([name]).report
    assert "has 11 episodes, but data_set.json declares 1,000,000,000,000" in report.sentences("warning")
    for change in ({"num_episodes_of_file": [-1]}, {"num_episodes_of_file": 3}, {"observation_space": []},
                   {"observation_space": {"type": "Box", "low": 0, "high": 1, "shape": [10**10], "dtype": "uint8"}},
                   {"observation_space": {"type": "Tuple", "spaces": [{**BOX, "shape": [2**24]}] * 3}},
                   {"num_episodes_of_file": [0] * 103},
                   {"observation_space": {"type": "Discrete", "n": -1, "start": 0}}):  # fmt: skip
        index.write_text(json.dumps(about | change))
        with pytest.raises(UsageError, match="data_set.json is damaged"):
            open_source(name)
    index.write_text("[" * 10**5)
    with pytest.raises(UsageError, match="data_set.json is damaged"):
        open_source(name)


def test_available_memory_considers_machine_and_container(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "CGROUP_LIMIT", tmp_path / "limit")
    assert limits.memory_at_hand() > 2**28
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  5 kB\n")
    assert limits.memory_at_hand() == 5 * 1024
    (tmp_path / "limit").write_text("max\n")
    assert limits.memory_at_hand() == 5 * 1024
    (tmp_path / "limit").write_text("4096\n")
    assert limits.memory_at_hand() == 4096


class Faulty(EpisodeSource):
    def __init__(self, where, environment):
        super().__init__(f"npz:{where}", SPACES)
        if where == "opened":
            raise KeyError("deep inside")

    def episodes(self):
        raise {"memory": MemoryError, "usage": UsageError, "interrupted": KeyboardInterrupt}.get(
            self.name.partition(":")[2], ZeroDivisionError
        )("deep\ninside")


def test_any_exception_of_a_source_becomes_a_sentence_with_the_file(monkeypatch, refused, capsys):
    monkeypatch.setattr(npz, "NpzSource", Faulty)
    for name, words in {
        "opened": r"npz:opened is damaged, or is not in the format of its scheme \(KeyError: 'deep inside'\)",
        "read": r"npz:read is damaged, or is not in the format of its scheme \(ZeroDivisionError: deep inside\)",
        "memory": "npz:memory does not fit in memory",
        "usage": "npz:usage: deep inside",
    }.items():
        with pytest.raises(UsageError, match=words) as error:
            list(SourceReading([f"npz:{name}"]))
        assert error.value.__cause__ is not None  # whose traceback is kept
    with pytest.raises(KeyboardInterrupt):
        list(SourceReading(["npz:interrupted"]))
    sentence = refused("import", "--source=npz:read")
    assert "npz:read is damaged" in sentence
    before = logging.get_verbosity()
    try:
        assert main(["import", "--source=npz:read", "--verbosity=1"]) == 2
    finally:
        logging.set_verbosity(before)
    said = capsys.readouterr().err
    assert said.endswith(sentence) and "in episodes" in said and "ZeroDivisionError: deep" in said


def test_a_half_npz_is_reported_as_unreadable(tmp_path):
    np.savez(tmp_path / "a.npz", **table_of(record()))
    content = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match=f"none of its {len(content) // 2:,} bytes are readable"):
        open_source(f"npz:{tmp_path}/a.npz")


@pytest.mark.parametrize(
    "name, module, extra",
    [("minari:a/b-v0", "minari", "minari"), ("d4rl:f", "h5py", "hdf5"), ("d3rlpy:f", "h5py", "hdf5"),
     ("lerobot:.", "pyarrow.parquet", "arrow")],
)  # fmt: skip
def test_a_missing_library_is_refused_with_its_install_command(name, module, extra, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("x")
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(UsageError, match=rf"needs the extra '{extra}': pip install 'alfish\[{extra}\]'"):
        open_source(name)


def test_every_scheme_has_its_file():
    for scheme in SCHEMES:
        with pytest.raises(UsageError):
            open_source(f"{scheme}:/nowhere")


# Reading


def test_fitting_but_different_spaces_give_a_warning():
    wider = Spaces(spaces.Box(-np.inf, np.inf, (3,), np.float64), SPACES.action)
    reading = SourceReading([source(record(), wider)], SPACES)
    assert [episode.id for episode in reading] == [str(k) for k in range(11)]
    said = reading.report.sentences("warning")
    assert str(wider.observation) in said and str(SPACES.observation) in said


@pytest.mark.parametrize(
    "action", [spaces.MultiDiscrete([3, 3], dtype=np.int32), spaces.MultiDiscrete([3, 3])], ids=str
)
def test_dtypes_of_integers_may_differ(action):
    actions = [e._replace(actions=np.stack([e.actions, e.actions], 1)) for e in record()]
    stored = Spaces(SPACES.observation, spaces.MultiDiscrete([3, 3]))
    reading = SourceReading([source(actions, stored)], Spaces(SPACES.observation, action))
    assert len(list(reading)) == 11 and "declared" not in reading.report.sentences("warning")
    other = Spaces(SPACES.observation, spaces.MultiDiscrete([3, 4], dtype=np.int32))
    with pytest.raises(UsageError, match="actions of arrays"):
        SourceReading([source(actions, stored)], other)


@pytest.mark.parametrize("shapes", [((), (1,)), ((1,), ()), ((1, 1), (1,))])
def test_one_number_a_step_has_any_shape(shapes):
    there, here = shapes
    of = Spaces(SPACES.observation, spaces.Box(-2, 6, here, np.float32))
    episodes = [e._replace(actions=e.actions[:, 0].reshape(-1, *there)) for e in record(continuous=True)]
    reading = SourceReading([Arrays(episodes)], of)
    assert [e.actions.shape for e in reading] == [(e.length, *here) for e in record()]
    assert f"action of shape {list(there)} is changed to {list(here)}" in reading.report.sentences("mended")


def test_a_data_set_of_another_environment_is_refused_and_both_are_named():
    with pytest.raises(UsageError, match=r"actions of arrays are Box.*the environment's are Discrete\(3\)"):
        SourceReading([source(record(continuous=True), BOX_SPACES)], SPACES)


def test_all_faulty_episodes_are_read_before_the_error():
    episodes = record()
    for k in (2, 7):
        episodes[k] = episodes[k]._replace(rewards=None)
    reading = SourceReading([Arrays(episodes[:4], SPACES), Arrays(episodes[4:], SPACES)])
    read = []
    with pytest.raises(UsageError, match=r"2 of 11 episodes.*\(2 episodes: arrays 2, arrays 7\)"):
        read.extend(reading)
    assert reading.report.num_read == 11
    assert isinstance(next(iter(SourceReading([source(episodes)], policy="warn"))), Episode)


def test_a_file_of_ours_is_a_plain_checkpoint(tmp_path):
    written(tmp_path / "set", record(2))
    state = torch.load(next((tmp_path / "set" / "episodes").iterdir()), weights_only=True)
    assert state["ids"] == ["0", "1"] and state["length"].tolist() == [3, 5]


def test_a_missing_part_of_a_data_set_is_named(tmp_path):
    with pytest.raises(UsageError, match="there is no file .*main_data.hdf5, which the data set needs; download"):
        source_files.check_regular(tmp_path / "main_data.hdf5")


def test_an_index_with_a_byte_order_mark_is_read(tmp_path):
    name = written(tmp_path / "set", record())
    index = tmp_path / "set" / "data_set.json"
    index.write_bytes(b"\xef\xbb\xbf" + index.read_bytes())
    assert len(list(open_source(name).episodes())) == len(record())


def test_a_table_whose_next_observations_are_rounded_is_warned_of(tmp_path):
    table = table_of(record())
    table["next_observations"] = table["next_observations"] + np.float32(0.001)
    np.savez(tmp_path / "a.npz", **table)
    buffer = buffer_of(f"npz:{tmp_path}/a.npz")
    sentence = buffer.report.sentences("warning")
    assert "rows end an episode because the next observation is not the observation of the next row" in sentence
    assert "(typical difference 0.001)" in sentence
