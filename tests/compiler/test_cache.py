"""The cache of graphs: its place, its size, and several processes at once."""

import errno
import io
import os
import subprocess
import sys

import pytest
import torch

from alfish.compiler import cache, inductor
from alfish.compiler.inductor import CompiledFunction, NotCompilable
from alfish.errors import UsageError


@pytest.fixture(autouse=True)
def no_directory_of_torch(monkeypatch):
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setattr(cache, "GIVEN", None)
    cache._own_directory.cache_clear()
    yield
    cache._own_directory.cache_clear()


def test_it_lies_in_the_users_cache_directory_by_versions(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "alfish" / "graphs" / cache.versions() and cache.directory().is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.directory().is_relative_to(tmp_path / ".cache" / "alfish")


def test_what_the_user_set_for_torch_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "GIVEN", str(tmp_path / "own"))
    assert cache.directory() == tmp_path / "own"
    with cache.in_use() as path:
        assert path == tmp_path / "own"
    assert cache.environment()[cache.VARIABLE] == str(tmp_path / "own")


def test_torchs_own_values_are_not_treated_as_user_values(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(cache.VARIABLE, "/tmp/torchinductor_user")
    assert cache.directory().is_relative_to(tmp_path)
    assert cache.VARIABLE not in cache.environment() and cache.environment()["XDG_CACHE_HOME"] == str(tmp_path)


def test_torch_uses_it_only_while_alfish_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with cache.in_use() as path:
        assert os.environ[cache.VARIABLE] == str(path)
    assert cache.VARIABLE not in os.environ


def test_a_directory_that_cannot_be_written_is_reported_once_and_replaced(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    assert cache.directory() == cache.directory() and cache.directory().is_relative_to(tmp_path)
    assert cache.directory().is_dir() and cache.directory().parent.name.startswith("alfish-")
    [record] = caplog.records
    assert "is not writable" in record.getMessage() and "set XDG_CACHE_HOME" in record.getMessage()


def test_a_full_disk_is_reported_before_compilation(monkeypatch, tmp_path, caplog):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", lambda dir: Full())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    assert cache.directory().parent.name.startswith("alfish-")
    assert "is not writable ([Errno 28] No space left on device); set XDG_CACHE_HOME" in caplog.text


def test_code_in_directories_of_other_users_is_not_loaded(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cache.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(UsageError, match="which belongs to another user; set XDG_CACHE_HOME to a writable directory"):
        cache.directory()


def test_cache_directories_depend_on_torch_version_and_processor(monkeypatch):
    names = {cache.versions.__wrapped__()}
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    names.add(cache.versions.__wrapped__())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    names.add(cache.versions.__wrapped__())
    assert len(names) == 3


def test_files_that_were_used_the_longest_time_ago_go_first(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = cache.directory().parent / "another-version"
    other.mkdir()
    paths = [other / "old", cache.directory() / "middle", cache.directory() / "new"]
    for k, path in enumerate(paths):
        path.write_bytes(bytes(100))
        os.utime(path, (k + 1, k + 1))
    cache.trim(250)
    assert [path.exists() for path in paths] == [False, True, True]
    cache.trim(250)
    assert [path.exists() for path in paths] == [False, True, True]
    with cache.lock("ab"):
        lock = cache.directory() / cache.LOCKS / "ab"
        os.utime(lock, (0, 0))
        cache.trim(0)
    assert not any(path.exists() for path in paths) and lock.exists()


def test_a_process_that_has_compiled_trims_the_cache_once(monkeypatch):
    calls = []
    monkeypatch.setattr(cache, "trim", lambda: calls.append(1))
    monkeypatch.setattr(inductor, "_compile", lambda graph, leaves, fake: graph)
    inductor._trim_cache.cache_clear()
    for _ in range(2):
        CompiledFunction(lambda x: x + 1, torch.ones(2))
    assert calls == [1]


def test_a_directory_of_the_users_is_never_trimmed(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "GIVEN", str(tmp_path))
    (tmp_path / "graph").write_bytes(bytes(100))
    cache.trim(0)
    assert (tmp_path / "graph").exists()


def test_a_lock_has_one_holder_and_a_killed_holder_releases_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache.directory() / cache.LOCKS / "ab"
    path.parent.mkdir()
    script = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(1, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(BlockingIOError), open(path) as file:
            cache.fcntl.flock(file, cache.fcntl.LOCK_EX | cache.fcntl.LOCK_NB)
        other.kill()
        with cache.lock("ab"), pytest.raises(BlockingIOError), open(path) as file:
            cache.fcntl.flock(file, cache.fcntl.LOCK_EX | cache.fcntl.LOCK_NB)
    with open(path) as file:
        cache.fcntl.flock(file, cache.fcntl.LOCK_EX | cache.fcntl.LOCK_NB)


def test_a_run_works_without_file_locks_and_user_name(monkeypatch, tmp_path):
    def no_locks(*arguments):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    with cache.lock("ab"):
        assert (cache.directory() / cache.LOCKS / "ab").exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    assert cache.directory().parent.name == f"alfish-{os.getuid()}"  # of no entry of /etc/passwd


def test_a_disk_that_fails_leaves_updates_plain(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def full(name):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "lock", full)
    with pytest.raises(NotCompilable, match="compiled code cannot be kept: .*No space left"):
        CompiledFunction(lambda x: x + 1, torch.zeros(2))


def test_a_directory_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache, "GIVEN", str(tmp_path / "file" / "graphs"))
    with pytest.raises(UsageError, match=r"kept in TORCHINDUCTOR_CACHE_DIR=.*graphs \(Not a directory\)"):
        cache.directory()
    monkeypatch.setattr(cache, "GIVEN", str(tmp_path / "new" / "graphs"))
    assert cache.directory().is_dir()
