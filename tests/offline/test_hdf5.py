"""D4RL's and d3rlpy's files: written here as they lay them out, and by d3rlpy itself where it is installed."""

import contextlib
import json

import numpy as np
import pytest
from data_sets import written
from recorded import BOX_SPACES, SPACES, assert_rows, record, table_of, unstretched, without_final

from alfish.errors import UsageError
from alfish.offline import OfflineBuffer, SourceReading, limits, open_source

h5py = pytest.importorskip("h5py", reason="needs the extra 'hdf5'")


NAMES = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")


def d4rl(path, episodes, next_observations=True, **change):
    """The layout of https://github.com/Farama-Foundation/D4RL: names, and flags a step."""
    table = table_of(episodes, next_observations)
    table = dict(zip(NAMES, table.values()))
    with h5py.File(path, "w") as file:
        for name, values in (table | change).items():
            if values is not None:
                file[name] = values
        file["infos/qpos"] = table["observations"]
        file["metadata/algorithm"] = "SAC"
    return f"d4rl:{path}"


@pytest.mark.parametrize("continuous", [False, True])
def test_d4rl_with_next_observations(tmp_path, continuous, block_rows):
    of, canonical = (BOX_SPACES, unstretched) if continuous else (SPACES, lambda actions: actions)
    episodes = record(continuous=continuous)
    assert_rows(OfflineBuffer([d4rl(tmp_path / "a", episodes)], spaces=of), episodes, canonical)


def test_d4rl_without_next_observations_drops_timed_out_steps(tmp_path, block_rows):
    buffer = OfflineBuffer([d4rl(tmp_path / "a", record(), False)], spaces=SPACES)
    assert_rows(buffer, without_final(record()))


def test_d4rl_without_time_outs_is_split_at_discontinuities(tmp_path, block_rows):
    buffer = OfflineBuffer([d4rl(tmp_path / "a", record(), timeouts=None)], spaces=SPACES)
    assert_rows(buffer, record())
    assert "no time-outs were recorded" in buffer.report.sentences("note")


def test_d4rl_that_stops_within_an_episode_is_truncated_there(tmp_path):
    episodes = record(2)
    table = table_of(episodes)
    table = {d4rl_name: table[name][:6] for d4rl_name, name in zip(NAMES, table)}
    with h5py.File(tmp_path / "a", "w") as file:
        for name, values in table.items():
            file[name] = values
    last = episodes[1]
    last = last._replace(
        observations=last.observations[:4], actions=last.actions[:3], rewards=last.rewards[:3],
        terminated=last.terminated[:3], truncated=np.array([False, False, True]),
    )  # fmt: skip
    assert_rows(OfflineBuffer([f"d4rl:{tmp_path}/a"], spaces=SPACES), [episodes[0], last])


def test_a_break_inside_data_is_reported_even_with_a_final_flag(tmp_path):
    timeouts = table_of(record())["truncated"]
    timeouts[7] = False  # of episode 1
    buffer = OfflineBuffer([d4rl(tmp_path / "a", record(), timeouts=timeouts)], spaces=SPACES)
    assert_rows(buffer, record())
    assert "1 episode ends without a flag" in buffer.report.sentences("note")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rewards": None}, "has no rewards, so it is not a D4RL data set; it has actions, infos"),
        ({"actions": np.zeros(5)}, "actions has 5 rows but rewards has 41"),
        ({"terminals": np.zeros(40)}, "terminated has 40 rows but rewards has 41"),
        ({"terminals": np.zeros((41, 2))}, r"terminals has shape \[41, 2\], but \[N\]"),
        ({"timeouts": np.full(41, 0.5)}, "timeouts has 0.5, but a flag must be 0 or 1"),
        ({"rewards": np.float64(1)}, r"rewards has shape \[\], but \[N, ...\]"),
        ({"rewards": None, "rewards/a": np.zeros(41)}, "rewards is a group, but an array is expected"),
        ({"terminals": None, "terminals/a": np.zeros(41)}, "terminals is a group, but an array is expected"),
    ],
)
def test_d4rl_that_is_something_else_is_named(tmp_path, change, words):
    with pytest.raises(UsageError, match=words):
        list(open_source(d4rl(tmp_path / "a", record(), **change)).episodes())


def d3rlpy(path, episodes, **change):
    """The layout of d3rlpy's `dataset.io.dump`, version 2.1; flags come as it has them, one an episode."""
    with h5py.File(path, "w") as file:
        file["columns"] = ["observations", "actions", "rewards", "terminated"]
        file["num_episodes"], file["version"] = len(episodes), "2.1"
        for i, e in enumerate(episodes):
            file[f"observations_{i}"], file[f"rewards_{i}"] = e.observations[:-1], e.rewards[:, None]
            file[f"actions_{i}"] = e.actions if e.actions.ndim == 2 else e.actions[:, None]
            file[f"terminated_{i}"] = bool(e.terminated[-1])
        for name in change:
            del file[name]
    return f"d3rlpy:{path}"


@pytest.mark.parametrize("continuous", [False, True])
def test_d3rlpy_invents_no_final_observation(tmp_path, continuous):
    of, canonical = (BOX_SPACES, unstretched) if continuous else (SPACES, lambda actions: actions)
    episodes = record(continuous=continuous)
    buffer = OfflineBuffer([d3rlpy(tmp_path / "a", episodes)], spaces=of)
    assert_rows(buffer, without_final(episodes), canonical)
    assert "stores no final observations" in buffer.report.sentences("note")


def test_an_episode_of_d3rlpy_that_lacks_a_part_is_named(tmp_path):
    name = d3rlpy(tmp_path / "a", record(), rewards_3=None)
    with pytest.raises(UsageError, match=r"not readable.*rewards_3.*\(1 episode: 3\)"):
        OfflineBuffer([name], spaces=SPACES)
    episodes = without_final(e for e in record() if e.id != "3")
    assert_rows(OfflineBuffer([name], spaces=SPACES, policy="drop_episode"), episodes)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("terminated", 0.3, "terminated is 0.3, but a flag must be 0 or 1"),
        ("terminated", np.nan, "terminated is nan, but a flag must be 0 or 1"),
        ("terminated", h5py.Empty("f4"), "terminated is .*Empty.*, but a flag must be 0 or 1"),
        ("rewards", np.ones((8, 2), np.float32), r"its rewards have shape \[8, 2\], but \[T, 1\] is expected"),
    ],
)
def test_an_episode_of_d3rlpy_that_is_something_else_is_named(tmp_path, field, value, words):
    name = d3rlpy(tmp_path / "a", record())
    with h5py.File(tmp_path / "a", "a") as file:
        del file[f"{field}_3"]
        file[f"{field}_3"] = value
    with pytest.raises(UsageError, match=rf"{words} \(1 episode: 3\)"):
        OfflineBuffer([name], spaces=SPACES)
    episodes = without_final(e for e in record() if e.id != "3")
    assert_rows(OfflineBuffer([name], spaces=SPACES, policy="drop_episode"), episodes)


def test_episodes_of_d3rlpy_beyond_the_declared_number_are_reported(tmp_path):
    name = d3rlpy(tmp_path / "a", record())
    with h5py.File(tmp_path / "a", "a") as file:
        file["num_episodes"][()] = 8
    report = OfflineBuffer([name], spaces=SPACES).report
    assert report.num_read == 8
    assert (
        "3 episodes are not read, because their indices are not below num_episodes = 8: 8, 9, 10"
        in report.sentences("warning")
    )


def test_an_invalid_d3rlpy_episode_count_is_named(tmp_path):
    name = d3rlpy(tmp_path / "a", record())
    with h5py.File(tmp_path / "a", "a") as file:
        del file["num_episodes"]
        file["num_episodes"] = 10.5
    with pytest.raises(UsageError, match="is damaged inside .*float.* as an integer"):
        OfflineBuffer([name], spaces=SPACES)


def test_several_observations_of_d3rlpy_are_a_tuple(tmp_path):
    name = d3rlpy(tmp_path / "a", record())
    with h5py.File(tmp_path / "a", "a") as file:
        for i, episode in enumerate(record()):
            del file[f"observations_{i}"]
            file[f"observations_{i}_0"] = episode.observations[:-1]
            file[f"observations_{i}_1"] = episode.observations[:-1] + 1
    for episode in open_source(name).episodes():
        one, other = episode.observations
        assert (one + 1 == other).all() and len(one) == episode.length + 1


def test_the_first_version_of_d3rlpys_files_is_a_table(tmp_path):
    table = table_of(record(), False)
    with h5py.File(tmp_path / "a", "w") as file:
        for name in ("observations", "rewards"):
            file[name] = table[name]
        file["actions"], file["terminals"] = table["actions"][:, None], table["terminated"].astype(np.float32)
        file["episode_terminals"] = (table["terminated"] | table["truncated"]).astype(np.float32)
    assert_rows(OfflineBuffer([f"d3rlpy:{tmp_path}/a"], spaces=SPACES), without_final(record()))


def test_a_table_without_resets_gives_a_warning(tmp_path):
    name = d4rl(tmp_path / "a", record(), False, timeouts=None)
    words = "transitions across resets are trained on; give"
    assert f"{words} timeouts" in OfflineBuffer([name], spaces=SPACES).report.sentences("warning")
    name = name.replace("d4rl:", "d3rlpy:")  # of the first version, whose names these are too
    assert f"{words} episode_terminals" in OfflineBuffer([name], spaces=SPACES).report.sentences("warning")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"terminals": np.full(41, 0.5)}, "terminals has 0.5, but a flag must be 0 or 1"),
        ({"episode_terminals": np.zeros(40)}, "truncated has 40 rows but rewards has 41"),
        ({"actions": np.float64(1)}, r"actions has shape \[\], but \[N, ...\]"),
    ],
)
def test_a_table_of_d3rlpy_that_is_something_else_is_named(tmp_path, change, words):
    name = d4rl(tmp_path / "a", record(), False, timeouts=None, **change).replace("d4rl:", "d3rlpy:")
    with pytest.raises(UsageError, match=words):
        list(open_source(name).episodes())


def test_what_d3rlpy_itself_wrote(tmp_path):
    d3rlpy = pytest.importorskip("d3rlpy", reason="d3rlpy is not installed")
    table = table_of(record(continuous=True), False)
    data_set = d3rlpy.dataset.MDPDataset(
        table["observations"], table["actions"], table["rewards"], table["terminated"].astype(np.float32),
        table["truncated"].astype(np.float32),
    )  # fmt: skip
    with open(tmp_path / "a", "w+b") as file:
        data_set.dump(file)
    buffer = OfflineBuffer([f"d3rlpy:{tmp_path}/a"], spaces=BOX_SPACES)
    assert_rows(buffer, without_final(record(continuous=True)), unstretched)


def external_link(file, name, secret):
    file[name] = h5py.ExternalLink(str(secret), "/rows")


def external_storage(file, name, secret):
    secret.with_suffix(".raw").write_bytes(b"7" * 41 * 4)
    storage = [(str(secret.with_suffix(".raw")), 0, h5py.h5f.UNLIMITED)]
    file.create_dataset(name, (41,), "f4", external=storage)


def virtual(file, name, secret):
    layout = h5py.VirtualLayout((41,), "f4")
    layout[:] = h5py.VirtualSource(str(secret), "rows", (41,))
    file.create_virtual_dataset(name, layout)


def soft_link(file, name, secret):
    file["elsewhere"] = h5py.ExternalLink(str(secret), "/")
    file[name] = h5py.SoftLink("/elsewhere/rows")


def second_link(file, name, secret):
    file[name] = file[next(other for other in ("terminals", "rewards_0", "episode_0/rewards") if other in file)]


def group_in_itself(file, name, secret):
    file["more/again"] = file["more"] if "more" in file else file.create_group("more")


FOREIGN = {
    external_link: "is a link into another file",
    external_storage: "is stored in another file",
    virtual: "is a virtual data set",
    soft_link: "is a link into another file|is a link to another part",
    second_link: "is linked from several places",
    group_in_itself: "is linked from several places",
}


@pytest.mark.parametrize("link", FOREIGN)
@pytest.mark.parametrize("scheme", ["d4rl", "d3rlpy", "minari"])
def test_data_in_other_files_are_not_copied(tmp_path, home, scheme, link):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["rows"] = np.full(41, 7, np.float32)
    if scheme == "minari":
        name, path, field = minari(record()), home / "test/stamped-v0/data/main_data.hdf5", "episode_3/rewards"
    else:
        name = (d4rl if scheme == "d4rl" else d3rlpy)(tmp_path / "a", record())
        path, field = tmp_path / "a", "rewards" if scheme == "d4rl" else "rewards_3"
    with h5py.File(path, "a") as file:
        del file[field]
        link(file, field, tmp_path / "secret.h5")
    with pytest.raises(UsageError, match=rf"{path} is refused: its '.*' ({FOREIGN[link]})"):
        open_source(name)


def minari(episodes):
    pytest.importorskip("minari", reason="needs the extra 'minari'")
    return written("minari:test/stamped-v0", episodes)


def test_groups_nested_without_end_are_refused_and_not_visited(tmp_path):
    """HDF5's own visits would end the process."""
    name = d4rl(tmp_path / "a", record())
    with h5py.File(tmp_path / "a", "a") as file:
        group = file
        for _ in range(40):
            group = group.create_group("g")
    with pytest.raises(UsageError, match="g/g' is nested more than 32 deep"):
        open_source(name)


def test_rows_of_two_precisions_are_compared_in_the_coarser_one(tmp_path):
    episodes = [e._replace(observations=e.observations.astype(np.float64) * 1000 + 1 / 3) for e in record()]
    table = table_of(episodes)
    name = d4rl(tmp_path / "a", episodes, observations=table["observations"].astype(np.float32))
    assert len(list(open_source(name).episodes())) == len(episodes)


def test_rows_that_only_a_declaration_has_are_refused(tmp_path):
    """HDF5 returns zeros for chunks that were never written."""
    for shape, chunks, words in (
        ((10**12,), (1000,), "declares 4.0 TB of uncompressed content, but the file has only"),
        ((10**12, 1), (1000, 1), "declares 4.0 TB of uncompressed content, but the file has only"),
        ((41,), (10**9,), "declares 4.0 GB of uncompressed content, but the file has only"),
    ):
        name = d4rl(tmp_path / "a", record(), rewards=None)
        with h5py.File(tmp_path / "a", "a") as file:
            file.create_dataset("rewards", shape, "f4", chunks=chunks, maxshape=(None, *shape[1:]))
        with pytest.raises(UsageError, match=words):
            open_source(name)


def test_episodes_that_only_a_number_has_are_refused(tmp_path, home):
    name = d3rlpy(tmp_path / "a", record())
    with h5py.File(tmp_path / "a", "a") as file:
        del file["num_episodes"]
        file["num_episodes"] = 10**12
    with pytest.raises(UsageError, match="declares 1,000,000,000,000 episodes but has 47 entries"):
        list(open_source(name).episodes())
    name, path = minari(record()), home / "test/stamped-v0/data/metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_episodes": 10**12}))
    with pytest.raises(UsageError, match="declares 1,000,000,000,000 episodes but has 11"):
        open_source(name)


def test_a_part_larger_than_available_memory_is_named(tmp_path, monkeypatch):
    names = [d4rl(tmp_path / "a", record()), d3rlpy(tmp_path / "b", record())]
    monkeypatch.setattr(limits, "memory_at_hand", lambda: 40)
    for name in names:
        with pytest.raises(UsageError, match="needs .* bytes of memory, but only 40 bytes are available"):
            list(SourceReading([name]))


@pytest.mark.parametrize("write", [d4rl, d3rlpy])
def test_episodes_beyond_memory_are_not_reported_as_damaged(tmp_path, monkeypatch, write):
    reading = SourceReading([write(tmp_path / "a", record())], policy="drop_episode")
    monkeypatch.setattr(limits, "memory_at_hand", lambda: 40)  # what was read before has taken the rest
    with pytest.raises(UsageError, match="needs .* bytes of memory, but only 40 bytes are available; free memory"):
        list(reading)


@pytest.mark.parametrize("write", [d4rl, d3rlpy])
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_truncated_file_is_reported_as_unreadable(tmp_path, write, share):
    name = write(tmp_path / "a", record())
    content = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(content[: int(share * len(content))])
    with pytest.raises(UsageError, match="is truncated or damaged: none of its .* bytes are readable"):
        open_source(name)


@pytest.mark.parametrize("num_bytes", [15, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("write", [d4rl, d3rlpy])
def test_any_wrong_byte_is_reported_in_one_sentence(tmp_path, write, num_bytes):
    name = write(tmp_path / "a", record())
    content = (tmp_path / "a").read_bytes()
    generator = np.random.default_rng(0)
    num_read = 0
    for _ in range(num_bytes):
        changed = bytearray(content)
        changed[generator.integers(len(content))] = generator.integers(256)
        (tmp_path / "a").write_bytes(changed)
        with contextlib.suppress(UsageError):
            OfflineBuffer([name], spaces=SPACES, policy="drop_episode").check_valid()
            num_read += 1
    assert num_read > num_bytes / 2  # most bytes are numbers, or nothing


@pytest.mark.parametrize("scheme", ["d4rl", "d3rlpy"])
def test_a_file_that_is_not_hdf5_is_named(tmp_path, scheme):
    (tmp_path / "a").write_text("these are no data")
    with pytest.raises(UsageError, match="is not an HDF5 file"):
        open_source(f"{scheme}:{tmp_path}/a")


def test_one_library_for_another_is_recognised(tmp_path):
    with pytest.raises(UsageError, match="it looks like a d3rlpy data set: d3rlpy:FILE"):
        open_source(d3rlpy(tmp_path / "a", record()).replace("d3rlpy:", "d4rl:"))
    with pytest.raises(UsageError, match="has timeouts and next_observations, so it is a D4RL data set; write d4rl:"):
        open_source(d4rl(tmp_path / "b", record()).replace("d4rl:", "d3rlpy:"))
    name = d4rl(tmp_path / "c", record(), timeouts=None, episode_terminals=np.zeros(41))
    with pytest.raises(UsageError, match="has episode_terminals, so it is a d3rlpy data set; write d3rlpy:"):
        open_source(name)


@pytest.mark.parametrize("scheme", ["d4rl", "d3rlpy"])
@pytest.mark.parametrize(
    "names, words",
    [
        (["data/demo_0/actions", "data/demo_0/obs/state", "mask/train"], "; robomimic's HDF5 files are not read"),
        (
            ["obs", "act", "rew", "done", "obs_next"],
            "; Tianshou's HDF5 buffers are not read by alfish; docs",
        ),
    ],
)
def test_files_of_other_libraries_are_named(tmp_path, scheme, names, words):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name in names:
            file[name] = np.zeros(3)
    with pytest.raises(UsageError, match=words):
        open_source(f"{scheme}:{tmp_path}/a.hdf5")
