"""Packed runs are read without trust: nothing leaves the directory, nothing is larger than it says, nothing changed."""

import errno
import hashlib
import io
import json
import re
import sys
import types
import zipfile

import pytest

from alfish.errors import RunError, UsageError
from alfish.runs.files import DiskError
from alfish.runs.packed import archive, fetching
from alfish.runs.packed.archive import MANIFEST, parse_manifest

FILES = {
    "config.gin": b"Trainer.seed = 1\n",
    "checkpoints/checkpoint-000000000001.pt": bytes(range(256)) * 64,
    "README.md": b"# A run\n",
}


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "run.zip"
    archive.pack(path, FILES, {"alfish_version": "0"})
    return path


def forged(path, files, manifest=None, compression=zipfile.ZIP_STORED):
    """Writes a zip file whose manifest is right about `files` unless another one is given."""
    entries = {name: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in files.items()}
    with zipfile.ZipFile(path, "w", compression) as out:
        out.writestr(MANIFEST, json.dumps({"format": 1, "files": entries} if manifest is None else manifest))
        for name, content in files.items():
            out.writestr(name, content)
    return path


def contents(directory):
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_packed_files_are_unpacked_unchanged(packed, tmp_path):
    manifest = archive.unpack(packed, tmp_path / "new")
    found = contents(tmp_path / "new")
    assert parse_manifest(found.pop(MANIFEST), "it") == manifest
    assert found == FILES and manifest.size == sum(map(len, FILES.values()))


def test_equal_files_give_equal_archives(packed, tmp_path):
    archive.pack(tmp_path / "other.zip", FILES, {"alfish_version": "0"})
    assert packed.read_bytes() == (tmp_path / "other.zip").read_bytes()


@pytest.mark.parametrize("name", ["eval/läufer.csv", "films/.film.mp4", "it's.csv"])
def test_what_would_not_be_unpacked_is_not_packed(tmp_path, name, monkeypatch):
    with pytest.raises(UsageError, match=f"{re.escape(repr(name))} cannot be packed: .*; rename the file"):
        archive.pack(tmp_path / "run.zip", {**FILES, name: b"x"}, {})
    monkeypatch.setattr("alfish.runs.packed.archive.MAX_MANIFEST", 300)
    with pytest.raises(UsageError, match="3 files, too many to pack"):
        archive.pack(tmp_path / "run.zip", FILES, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [-1, -(10**9)])
def test_a_negative_size_is_refused(tmp_path, size):
    entry = {"size": size, "sha256": hashlib.sha256(b"x").hexdigest()}
    path = forged(tmp_path / "bad.zip", {"a": b"x"}, {"format": 1, "files": {"a": entry}})
    with pytest.raises(UsageError, match=f"is refused: a has the size {size}"):
        archive.unpack(path, tmp_path / "new")


@pytest.mark.parametrize(
    "name", ["../outside", "/tmp/outside", "a/../../outside", "a//b", ".hidden", "a/.b", "a\\b", "a\nb", MANIFEST]
)
def test_no_file_is_written_outside_of_the_directory(tmp_path, name):
    path = forged(tmp_path / "bad.zip", {name: b"x"} if name != MANIFEST else {}, None)
    if name == MANIFEST:
        path = forged(path, {}, {"format": 1, "files": {MANIFEST: {"size": 1, "sha256": ""}}})
    before = set(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="lists the file"):
        archive.unpack(path, tmp_path / "new")
    assert set(tmp_path.rglob("*")) == before


def test_files_that_the_manifest_does_not_name_are_not_written(tmp_path):
    path = forged(tmp_path / "run.zip", FILES)
    with zipfile.ZipFile(path, "a") as out:
        out.writestr("../outside", b"x")
        out.writestr("extra", b"x")
    archive.unpack(path, tmp_path / "new")
    assert contents(tmp_path / "new").keys() == {*FILES, MANIFEST} and not (tmp_path / "outside").exists()


def test_a_truncated_archive_is_refused_in_one_sentence(packed, tmp_path):
    whole = packed.read_bytes()
    for length in (0, 1, 30, len(whole) // 2, len(whole) - 1):
        packed.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="run.zip is truncated or not a zip file") as error:
            archive.unpack(packed, tmp_path / "new")
        assert "\n" not in str(error.value) and not (tmp_path / "new").exists()


def test_a_changed_byte_is_found(packed, tmp_path):
    whole = bytearray(packed.read_bytes())
    whole[whole.index(bytes(range(256))) + 7] ^= 1
    packed.write_bytes(whole)
    with pytest.raises(UsageError, match="run.zip"):
        archive.unpack(packed, tmp_path / "new")
    # Python's checksum of the zip format found it. A forger mends that one, and not the manifest's.
    entries = {"config.gin": {"size": 3, "sha256": hashlib.sha256(b"abd").hexdigest()}}
    path = forged(tmp_path / "forged.zip", {"config.gin": b"abc"}, {"format": 1, "files": entries})
    with pytest.raises(UsageError, match="config.gin is not the file that was packed"):
        archive.unpack(path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_small_file_cannot_unpack_to_a_large_one(tmp_path):
    path = forged(tmp_path / "bomb.zip", {"zeros": bytes(10_000_000)}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="it is compressed"):
        archive.unpack(path, tmp_path / "new")
    entries = {name: {"size": 10**15, "sha256": ""} for name in FILES}
    path = forged(tmp_path / "bomb.zip", FILES, {"format": 1, "files": entries})
    with pytest.raises(UsageError, match="larger than the archive"):
        archive.unpack(path, tmp_path / "new")


@pytest.mark.parametrize("manifest", [[], {}, {"format": 1}, {"format": 1, "files": {"a": 1}}, "x"])
def test_another_manifest_is_refused_in_one_sentence(tmp_path, manifest):
    path = forged(tmp_path / "run.zip", {}, manifest)
    with pytest.raises(UsageError, match="not a packed run"):
        archive.unpack(path, tmp_path / "new")


def test_other_errors_have_messages_of_one_sentence(packed, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(UsageError, match="full is not empty"):
        archive.unpack(packed, tmp_path / "full")
    assert contents(tmp_path / "full") == {"file": b"mine"}
    with pytest.raises(UsageError, match="there is no file"):
        archive.unpack(tmp_path / "missing.zip", tmp_path / "new")
    with pytest.raises(UsageError, match="newer version of alfish"):
        archive.unpack(forged(tmp_path / "b.zip", {}, {"format": 9, "files": {}}), tmp_path / "new")
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as out:
        out.writestr("a", b"b")
    with pytest.raises(UsageError, match="has no manifest.json"):
        archive.unpack(tmp_path / "plain.zip", tmp_path / "new")


def test_a_temporary_directory_is_removed_after_reading(packed):
    with fetching.as_directory(packed) as directory:
        assert (directory / "config.gin").read_bytes() == FILES["config.gin"]
    assert not directory.exists()
    with (
        pytest.raises(UsageError, match=f"^{packed}/done is damaged$"),
        fetching.as_directory(packed) as directory,
    ):
        raise UsageError(f"{directory}/done is damaged")
    with fetching.as_directory("runs/x") as directory:
        assert str(directory) == "runs/x"


@pytest.fixture
def fake_hub(monkeypatch, packed, tmp_path):
    """A hub with one repository; returns its directory and the calls."""
    directory, calls = tmp_path / "snapshot", []
    archive.unpack(packed, directory)

    def snapshot_download(repository, revision=None):
        calls.append((repository, revision))
        if repository != "org/run":
            raise OSError("404 Client Error")
        return str(directory)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return directory, calls


def test_a_repository_of_the_hub_is_checked_and_opened(fake_hub, tmp_path):
    directory, calls = fake_hub
    with fetching.as_directory("hf:org/run@v1") as found:
        assert found == directory
    assert calls == [("org/run", "v1")]
    fetching.unpack("hf:org/run", tmp_path / "mine")
    assert contents(tmp_path / "mine") == contents(directory)
    (directory / "README.md").write_bytes(b"# A run, described on the hub\n")
    assert fetching.download("hf:org/run")
    (directory / "config.gin").write_bytes(b"Trainer.seed = 2\n")
    with pytest.raises(UsageError, match="config.gin is not the file that was packed"):
        fetching.download("hf:org/run")
    (directory / "config.gin").unlink()
    with pytest.raises(UsageError, match="has no config.gin"):
        fetching.download("hf:org/run")


def test_mistakes_with_the_hub_are_reported_in_one_sentence(fake_hub, monkeypatch):
    with pytest.raises(UsageError, match="hf:org/name"):
        fetching.download("hf:run")
    with pytest.raises(RunError, match="cannot be downloaded: 404"):
        fetching.download("hf:org/missing")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'alfish\[hub\]'"):
        fetching.download("hf:org/run")


def test_only_names_of_the_hub_reach_it(fake_hub, packed):
    for name in (packed, str(packed), "runs/hf:org", "org/run"):
        with fetching.as_directory(name):
            pass
    assert fake_hub[1] == []


def test_a_full_disk_on_close_is_not_reported_as_a_bad_archive(packed, tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def close(self):
            if not self.closed:  # it is closed again when it is deleted
                super().close()
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "open", lambda *arguments: Full(), raising=False)
    with pytest.raises(DiskError, match="cannot be written to: No space left on device"):
        archive.unpack(packed, tmp_path / "new")
    assert not (tmp_path / "new").exists()
