"""Minari's data sets, written by Minari itself, in each of its formats."""

import importlib.metadata
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from recorded import BOX_SPACES, SPACES, assert_rows, record, unstretched

import alfish
from alfish.errors import UsageError
from alfish.offline import OfflineBuffer, SourceReading, Spaces, open_source

minari = pytest.importorskip("minari", reason="needs the extra 'minari'")
pytest.importorskip("h5py", reason="needs the extra 'hdf5'")
pytestmark = [
    pytest.mark.usefixtures("home"),
    pytest.mark.filterwarnings("ignore"),  # Minari's, of what a data set might say of itself and does not
]

FORMATS = ["hdf5", pytest.param("arrow", marks=pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("pyarrow") is None, reason="needs the extra 'arrow'"))]  # fmt: skip


def written(episodes, of=SPACES, data_format="hdf5", name="test/stamped-v0"):
    from minari.data_collector import EpisodeBuffer

    buffers = [
        EpisodeBuffer(
            observations=e.observations, actions=e.actions, rewards=e.rewards, terminations=e.terminated,
            truncations=e.truncated,
        )
        for e in episodes
    ]  # fmt: skip
    minari.create_dataset_from_buffers(
        name, buffers, observation_space=of.observation, action_space=of.action, data_format=data_format,
        jpeg_encoding=False,
    )  # fmt: skip
    return f"minari:{name}"


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("continuous", [False, True])
def test_every_row_is_right(data_format, continuous):
    of, canonical = (BOX_SPACES, unstretched) if continuous else (SPACES, lambda actions: actions)
    episodes = record(continuous=continuous)
    buffer = OfflineBuffer([written(episodes, of, data_format)])
    assert buffer.spaces == of
    assert_rows(buffer, episodes, canonical)
    assert buffer.report.found("mended") == {} or data_format == "arrow"


@pytest.mark.parametrize("data_format", FORMATS)
def test_nests_keep_their_structure(data_format):
    space = spaces.Dict(here=SPACES.observation, both=spaces.Tuple([SPACES.observation, spaces.Discrete(9)]))
    episodes = [
        e._replace(
            observations={
                "here": e.observations,
                "both": (e.observations + 1, e.observations[:, 2].astype(np.int64)),
            }
        )
        for e in record()
    ]
    buffer = OfflineBuffer([written(episodes, Spaces(space, SPACES.action), data_format)])
    seen = buffer.sample(100).experience.time_step.observation
    assert (seen["here"] + 1 == seen["both"][0]).all() and (seen["here"][..., 2] == seen["both"][1]).all()


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("option", ["", "?leave_out=mission"])
def test_text_is_left_out_of_observations(data_format, option):
    """As in the data sets of MiniGrid and BabyAI."""
    space = spaces.Dict(here=SPACES.observation, mission=spaces.Text(20))
    episodes = [
        e._replace(observations={"here": e.observations, "mission": ["go to the door"] * len(e.observations)})
        for e in record()
    ]
    name = written(episodes, Spaces(space, SPACES.action), data_format) + option
    buffer = OfflineBuffer([name])
    assert buffer.spaces.observation == spaces.Dict(here=SPACES.observation)
    assert buffer.sample(9).experience.time_step.observation.keys() == {"here"}
    told = (
        "is left out"
        if option
        else "to leave it out without this warning, use minari:test/stamped-v0?leave_out=mission"
    )
    assert told in buffer.report.sentences("note" if option else "warning", 9)


def test_any_key_of_observations_may_be_left_out():
    inner = spaces.Dict(text=spaces.Text(9), number=SPACES.observation)
    space = spaces.Dict(here=SPACES.observation, inner=inner)
    episodes = [
        e._replace(
            observations={
                "here": e.observations,
                "inner": {"text": ["x"] * len(e.observations), "number": e.observations},
            }
        )
        for e in record()
    ]
    name = written(episodes, Spaces(space, SPACES.action))
    buffer = OfflineBuffer([f"{name}?leave_out=here,inner.text"])
    assert buffer.spaces.observation == spaces.Dict(inner=spaces.Dict(number=SPACES.observation))
    buffer = OfflineBuffer([f"{name}?leave_out=inner"])
    assert buffer.spaces.observation == spaces.Dict(here=SPACES.observation)
    assert "left out" not in buffer.report.sentences("warning", 9)
    with pytest.raises(UsageError, match="leave_out has there, but the keys of observations are here, inner, inner."):
        open_source(f"{name}?leave_out=there")


@pytest.mark.parametrize("is_jpeg", [True, False])
def test_images_that_are_stored_as_jpeg_are_reported(is_jpeg):
    from minari.data_collector import EpisodeBuffer

    space = spaces.Box(0, 255, (32, 32, 3), np.uint8)
    buffers = [
        EpisodeBuffer(
            observations=np.stack([space.sample() for _ in range(e.length + 1)]), actions=e.actions, rewards=e.rewards,
            terminations=e.terminated, truncations=e.truncated,
        )
        for e in record()
    ]  # fmt: skip
    options = {"observation_space": space, "action_space": SPACES.action, "jpeg_encoding": is_jpeg}
    minari.create_dataset_from_buffers("test/images-v0", buffers, **options)
    source = open_source("minari:test/images-v0")
    assert any("images are stored as JPEG" in note for note in source.notes) == is_jpeg


def test_a_data_set_of_a_newer_minari_names_the_version_to_install(home):
    name = written(record())
    path = home / "test/stamped-v0/data/metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"minari_version": "9.1.0"}))
    words = f"was written by Minari 9.1.0, but Minari {minari.__version__}, which is installed here, cannot read it"
    with pytest.raises(UsageError, match=f"{words}; pip install --upgrade minari"):
        open_source(name)


def test_a_missing_data_set_is_refused_with_existing_names():
    written(record())
    with pytest.raises(UsageError, match="here are test/stamped-v0; `minari download test/stampd-v0` downloads"):
        open_source("minari:test/stampd-v0")


def main_file(home):
    return home / "test/stamped-v0/data/main_data.hdf5"


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_truncated_file_is_reported_as_unreadable(home, share):
    name = written(record())
    content = main_file(home).read_bytes()
    main_file(home).write_bytes(content[: int(share * len(content))])
    with pytest.raises(UsageError, match="main_data.hdf5 is truncated or damaged: none of its .* bytes are readable"):
        open_source(name)


def test_an_incomplete_episode_is_named_and_others_are_read(home):
    import h5py

    name = written(record())
    with h5py.File(main_file(home), "a") as file:
        del file["episode_3/rewards"]
        del file["episode_0"]
    with pytest.raises(UsageError, match="2 of 11 episodes .*it is not readable.*rewards"):
        list(SourceReading([name]))
    buffer = OfflineBuffer([name], policy="drop_episode")
    assert_rows(buffer, [e for e in record() if e.id not in "03"])


def test_a_truncated_arrow_episode_is_named_and_others_are_read(home):
    pytest.importorskip("pyarrow", reason="needs the extra 'arrow'")
    name = written(record(), data_format="arrow")
    (path,) = (home / "test/stamped-v0/data/3").glob("*.arrow")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    buffer = OfflineBuffer([name], policy="drop_episode")
    assert_rows(buffer, [e for e in record() if e.id != "3"])
    assert list(buffer.report.found("error").values()) == [["3"]]


@pytest.mark.parametrize("data_format", FORMATS)
def test_episodes_beyond_the_declared_number_are_reported(home, data_format):
    name = written(record(), data_format=data_format)
    path = home / "test/stamped-v0/data/metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_episodes": 8}))
    report = OfflineBuffer([name]).report
    assert report.num_read == 8
    assert "3 episodes are not read, because their indices are not below total_episodes = 8" in report.sentences(
        "warning"
    )
    assert ": 8, 9, 10" in report.sentences("warning")


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
def test_rows_that_take_no_room_are_refused(home, data_format):
    pytest.importorskip("pyarrow", reason="needs the extra 'arrow'")
    import pyarrow
    from pyarrow import ipc, parquet

    name = written(record(), data_format=data_format)
    (path,) = (home / "test/stamped-v0/data/3").glob(f"*.{data_format}")
    whole = ipc.open_file(path).read_all() if data_format == "arrow" else parquet.read_table(path)
    count = 4_000_000
    columns = {
        field.name: pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.zeros(3 * count, np.float32)), 3)
        if field.name == "observations"
        else pyarrow.array(np.zeros(count, field.type.to_pandas_dtype()))
        for field in whole.schema
    }
    table = pyarrow.table(columns)
    if data_format == "arrow":
        with ipc.new_file(str(path), table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(table)
    else:
        parquet.write_table(table, path, compression="zstd")
    with pytest.raises(UsageError, match=rf"{path} declares 1\d\d.* MB of uncompressed content, but the file has only"):
        open_source(name)


def test_pipes_are_named_and_not_read(home):
    name = written(record())
    for file in ("main_data.hdf5", "metadata.json"):
        path = home / "test/stamped-v0/data" / file
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(UsageError, match=f"{path} is a pipe"):
            open_source(name)


def test_what_minari_stores_without_a_word_is_found():
    episodes = record()
    episodes[1] = episodes[1]._replace(rewards=episodes[1].rewards[:-1])
    episodes[2].observations[0] = np.nan
    episodes[3] = episodes[3]._replace(observations=episodes[3].observations[:-1])
    episodes[4] = episodes[4]._replace(rewards=episodes[4].rewards.astype(np.int64))
    reading = SourceReading([written(episodes)], policy="drop_episode")
    assert [e.id for e in reading] == ["0", *(str(k) for k in range(3, 11))]
    errors, mended = reading.report.found("error"), reading.report.found("mended")
    assert errors == {"it has 4 rewards but 5 actions": ["1"], "observation is not finite": ["2"]}
    assert ["3"] in mended.values() and mended["rewards of dtype int64 are converted to float32"] == ["4"]


def test_a_set_that_would_build_an_environment_to_know_its_spaces_is_refused(home):
    name = written(record())
    path = home / "test/stamped-v0/data/metadata.json"
    metadata = json.loads(path.read_text())
    del metadata["observation_space"]
    metadata["env_spec"] = json.dumps({"id": "x-v0", "entry_point": "antigravity:Env"})
    path.write_text(json.dumps(metadata))
    with pytest.raises(UsageError, match="declares no observation_space"):
        open_source(name)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"observation_space": "{", "action_space": "{"}'])
def test_metadata_that_are_damaged_are_named(home, content):
    name = written(record())
    (home / "test/stamped-v0/data/metadata.json").write_text(content)
    with pytest.raises(UsageError, match="not a complete Minari data set"):
        open_source(name)
    shutil.rmtree(home / "test")


def test_the_extra_installs_the_requirements_of_minari_download():
    text = (Path(alfish.__file__).parent.parent / "pyproject.toml").read_text()
    [requirement] = re.findall(r'^minari = \["minari\[([\w,]+)\]', text, re.MULTILINE)
    assert set(requirement.split(",")) == {"hdf5", "hf"}
    needed = [line for line in importlib.metadata.requires("minari") if "huggingface_hub" in line]
    assert any('extra == "hf"' in line for line in needed)
