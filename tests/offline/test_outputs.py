"""Data sets are written whole or not at all, in alfish's own layout and in Minari's, and read again as they were."""

import os

import gymnasium
import numpy as np
import pytest
from data_sets import NEEDS_MINARI, assert_same, left_by, read, written
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from recorded import BOX_SPACES, SPACES, assert_rows, record, unstretched

from alfish.configuration import opening
from alfish.environments import make_environment
from alfish.environments.wrapping import StickyAction
from alfish.errors import RunError, UsageError
from alfish.offline import MinariWriter, OfflineBuffer, Spaces, open_writer
from alfish.offline import data_set as writer_module
from alfish.offline.outputs import rebuildable

pytestmark = pytest.mark.usefixtures("home")


@NEEDS_MINARI
def test_a_key_that_hdf5_cannot_store_is_refused_before_anything_is_recorded():
    box = spaces.Box(-1, 1, (2,))
    nested = spaces.Dict(body=spaces.Tuple([spaces.Dict({"walker/joints": box})]))
    with pytest.raises(
        UsageError,
        match="cannot store the observation 'walker/joints', because '/' separates groups in HDF5",
    ):
        MinariWriter("test/slash-v0", Spaces(nested, spaces.Discrete(2)))
    MinariWriter("test/slash-v0", Spaces(spaces.Dict(joints=box), spaces.Discrete(2)))


@NEEDS_MINARI
@pytest.mark.parametrize("shard_bytes", [1, 200, 2**25])
@pytest.mark.parametrize("continuous", [False, True])
def test_minari_gives_back_every_row(monkeypatch, shard_bytes, continuous):
    monkeypatch.setattr(writer_module, "SHARD_BYTES", shard_bytes)
    of, canonical = (BOX_SPACES, unstretched) if continuous else (SPACES, lambda actions: actions)
    episodes = record(continuous=continuous)
    name = written("minari:test/set-v0", episodes, of, {"seeds": list(range(50, 61)), "algorithm": "Mine"})
    buffer = OfflineBuffer([name])
    assert buffer.spaces == of
    assert_rows(buffer, episodes, canonical)
    import minari

    storage = minari.load_dataset("test/set-v0").storage
    assert [told["seed"] for told in storage.get_episode_metadata(range(11))] == list(range(50, 61))
    assert storage.metadata["algorithm_name"] == "Mine" and storage.metadata["alfish"]["algorithm"] == "Mine"


@NEEDS_MINARI
def test_images_and_nests_return_unchanged():
    space = spaces.Dict(
        image=spaces.Box(0, 255, (40, 40, 3), np.uint8),
        both=spaces.Tuple([SPACES.observation, spaces.Discrete(9, start=2)]),
    )
    generator = np.random.default_rng(0)
    episodes = [
        e._replace(
            observations={
                "both": (e.observations, e.observations[:, 2].astype(np.int64) + 2),
                "image": generator.integers(0, 256, (e.length + 1, 40, 40, 3), np.uint8),
            }
        )
        for e in record()
    ]
    assert_same(read(written("minari:images-v0", episodes, Spaces(space, SPACES.action))), episodes)


@pytest.mark.parametrize("failing", ["add", "finish"])
def test_a_data_set_appears_only_when_complete(output, tmp_path, monkeypatch, failing):
    if failing == "finish":
        for module in ("alfish.offline.data_set", "alfish.offline.outputs"):

            def fails(*_):
                raise OSError("No space left on device")

            monkeypatch.setattr(f"{module}.os.replace", fails)
    expected = RunError if failing == "finish" else ZeroDivisionError
    with pytest.raises(expected), open_writer(output, SPACES) as writer:
        monkeypatch.setattr(writer, "_num_bytes", 2**40)  # so that it writes at once
        writer.add(record()[0])
        assert left_by(tmp_path)
        assert all(any(part.startswith(".") for part in path.parts) for path in left_by(tmp_path))
        if failing == "add":
            raise ZeroDivisionError
        writer.finish({})
    assert [path for path in left_by(tmp_path) if path.name != "namespace_metadata.json"] == []


@NEEDS_MINARI
def test_the_directory_given_to_minari_is_restored(monkeypatch, home):
    written("minari:test/set-v0", record())
    assert os.environ["MINARI_DATASETS_PATH"] == str(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("MINARI_DATASETS_PATH")
    written("minari:test/set-v0", record())
    assert "MINARI_DATASETS_PATH" not in os.environ
    assert (home / ".minari/datasets/test/set-v0/data/main_data.hdf5").is_file()


@NEEDS_MINARI
def test_a_name_can_be_used_only_once():
    written("minari:test/set-v0", record())
    with pytest.raises(UsageError, match="minari:test/set-v0 already exists .*choose another name or version"):
        MinariWriter("test/set-v0", SPACES)
    MinariWriter("test/set-v1", SPACES)


@pytest.mark.parametrize("command", ["export", "record"])
def test_an_existing_output_is_refused_before_work_starts(command, output, tmp_path, monkeypatch, refused):
    written(output, record(1))
    before = {path: path.read_bytes() for path in left_by(tmp_path)}

    def opened(*_):
        raise AssertionError("the run was opened")

    monkeypatch.setattr(opening, "open_run", opened)
    words = refused(command, "--root_dir=nowhere", f"--output={output}")
    assert "already exists" in words or "is not empty" in words
    assert {path: path.read_bytes() for path in left_by(tmp_path)} == before


class Silent(gymnasium.Wrapper):
    """Does not record what it was made with, so that gymnasium cannot make it again."""


def test_specs_are_kept_if_gymnasium_can_make_them(monkeypatch):
    def spec(*wrappers):
        env = gymnasium.make("CartPole-v1")
        for wrapper in wrappers:
            env = wrapper(env)
        return rebuildable(env.spec)

    assert spec().id == "CartPole-v1"
    kept = spec(lambda env: gymnasium.wrappers.TimeLimit(env, 7), gymnasium.wrappers.FlattenObservation)
    again = gymnasium.make(kept)
    assert isinstance(again, gymnasium.wrappers.FlattenObservation) and again.spec.max_episode_steps == 7
    assert spec(Silent) is None
    assert spec(lambda env: gymnasium.wrappers.TransformReward(env, abs)) is None  # a function is no JSON
    monkeypatch.setitem(gymnasium.registry, "Local-v0", EnvSpec("Local-v0", entry_point=lambda: None))
    assert rebuildable(gymnasium.spec("Local-v0")) is None
    assert rebuildable(None) is None


def test_unusable_specs_are_left_out():
    made = make_environment("CartPole-v1", wrappers=[StickyAction])
    made.close()
    assert made.env_spec.additional_wrappers[-1].name == "StickyAction"
    assert rebuildable(made.env_spec) is None  # gymnasium calls it with arguments that it does not take
    assert rebuildable(make_environment("CartPole-v1").env_spec).id == "CartPole-v1"
