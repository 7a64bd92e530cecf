import errno
import hashlib
import io
import json
import os
import pickle
import random
import signal
import stat
import zipfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import alfish
from alfish.errors import UsageError
from alfish.runs import checkpoint_file, files
from alfish.runs.checkpoints import Checkpoints, Origin
from alfish.runs.files import write_atomically
from alfish.runs.loading import check_like, load_model
from alfish.runs.random_state import rng_state, set_rng_state


def _state(value):
    return {"weight": torch.full((3,), float(value)), "counters": {"updates": value}, "names": ["a", None, True, 0.5]}


def _value(loaded):
    step, state = loaded
    assert torch.equal(state["weight"], torch.full((3,), float(state["counters"]["updates"])))
    return step, state["counters"]["updates"]


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def test_a_state_returns_unchanged(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    path = checkpoints.save(12345, _state(7))
    assert path.name == "checkpoint-000000012345.pt"
    step, state = checkpoints.load()
    assert step == 12345
    assert torch.equal(state.pop("weight"), torch.full((3,), 7.0))
    assert state == {"counters": {"updates": 7}, "names": ["a", None, True, 0.5]}
    assert list(tmp_path.rglob("*.tmp")) == []


def test_the_file_is_an_ordinary_torch_file_too(tmp_path):
    path = Checkpoints(tmp_path).save(1, _state(7))
    assert torch.load(path, weights_only=True)["counters"] == {"updates": 7}


def test_an_optimizer_continues_bit_for_bit(tmp_path):
    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()

    def make():
        model = nn.Linear(4, 2)
        return model, torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.8, 0.9))

    model, optimizer = make()
    train(model, optimizer)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer)

    resumed_model, resumed_optimizer = make()
    _, state = checkpoints.load()
    load_model(resumed_model, state["model"], "the policy")
    resumed_optimizer.load_state_dict(state["optimizer"])
    train(resumed_model, resumed_optimizer)
    assert torch.equal(resumed_model.weight, model.weight)
    assert torch.equal(resumed_model.bias, model.bias)


@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped"])
def test_a_broken_newest_checkpoint_falls_back_with_a_message(tmp_path, caplog, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, _state(1))
    newest = checkpoints.save(20, _state(2))
    content = newest.read_bytes()
    if damage == "flipped":
        _flip_a_bit(newest)
    else:
        newest.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    assert _value(checkpoints.load()) == (10, 1)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "checkpoint-000000000020.pt" in record.getMessage()
    assert "FALLING BACK to checkpoint-000000000010.pt" in record.getMessage()


def test_every_flipped_bit_is_detected(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, {"x": torch.zeros(4)})
    content = path.read_bytes()
    for position in [*range(0, len(content), 7), *range(len(content) - 300, len(content))]:  # the trailer whole
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match="corrupt|checksum is missing"):
            checkpoints.load(1)


def test_with_every_file_broken_it_never_starts_from_scratch(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        _flip_a_bit(checkpoints.save(step, _state(step)))
    with pytest.raises(UsageError, match="None of the 2 checkpoints .* is readable"):
        checkpoints.load()


def test_a_missing_checkpoint_is_named_with_a_remedy(tmp_path):
    checkpoints = Checkpoints(tmp_path / "empty")
    assert checkpoints.steps() == []
    with pytest.raises(UsageError, match="no checkpoint in .*empty; check the path"):
        checkpoints.load()
    with pytest.raises(UsageError, match="no checkpoint at 5 .*there is none"):
        checkpoints.load(5)
    assert not (tmp_path / "empty").exists()  # a reader makes nothing
    checkpoints.save(1, _state(1))
    checkpoints.save(2, _state(2))
    with pytest.raises(UsageError, match=r"no checkpoint at 5 .*there are \[1, 2\]"):
        checkpoints.load(5)
    with pytest.raises(UsageError, match="marked as the best"):
        checkpoints.load("best")
    with pytest.raises(UsageError, match=r"no checkpoint at 5 .*there are \[1, 2\]"):
        checkpoints.mark_best(5)
    with pytest.raises(UsageError, match="'newest'"):
        checkpoints.load("newest")


def test_an_asked_for_checkpoint_never_falls_back(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, _state(1))
    _flip_a_bit(checkpoints.save(2, _state(2), best=True))
    for which in (2, "best"):
        with pytest.raises(UsageError, match="corrupt"):
            checkpoints.load(which)
    assert _value(checkpoints.load(1)) == (1, 1)


@pytest.mark.parametrize("signed", [False, True])
def test_a_pickle_with_code_in_a_checkpoints_place_is_refused(tmp_path, caplog, signed):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, _state(1))
    path = checkpoints.save(2, _state(2))
    evidence = tmp_path / "executed"
    if signed:  # a forger can compute a checksum
        file = io.BytesIO()
        torch.save({"weight": _Bomb(evidence)}, file)
        path.write_bytes(file.getvalue() + checkpoint_file._trailer(hashlib.sha256(file.getvalue())))
        torch.load(path, weights_only=False)  # the bomb does go off where it is allowed to
        assert evidence.exists()
        evidence.unlink()
    else:
        path.write_bytes(pickle.dumps(_Bomb(evidence)))
    with pytest.raises(UsageError, match="refused" if signed else "checksum is missing"):
        checkpoints.load(2)
    assert _value(checkpoints.load()) == (1, 1)
    assert not evidence.exists()


def test_unrelated_errors_are_not_reported_as_corruption(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, _state(1))
    checkpoints.save(2, _state(2))

    def into(state):
        raise error

    for error in (MemoryError("too little"), UsageError("does not fit PPO")):
        with pytest.raises(type(error), match=str(error)):
            checkpoints.load(into=into)


def _signed(content):
    return content + checkpoint_file._trailer(hashlib.sha256(content))


def _with_header(path, **fields):
    """The file with another header, and the checksum that belongs to it."""
    content = path.read_bytes()[: -checkpoint_file._TRAILER_SIZE]
    start = content.rindex(checkpoint_file._HEADER_START) + len(checkpoint_file._HEADER_START)
    path.write_bytes(_signed(content[:start] + json.dumps(json.loads(content[start:]) | fields).encode()))


def _without_header(path):
    """The file as alfish wrote it before there were headers."""
    content = path.read_bytes()[: -checkpoint_file._TRAILER_SIZE]
    path.write_bytes(_signed(content[: content.rindex(checkpoint_file._HEADER_START)]))


def _saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _compressed(content):
    file = io.BytesIO()
    whole = io.BytesIO(_saved(content))
    with zipfile.ZipFile(whole) as before, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as after:
        for name in before.namelist():
            after.writestr(name, before.read(name))
    return file.getvalue()


def _tree(depth):
    """Tuples that share their parts: 2**depth leaves."""
    node = (1, 2)
    for _ in range(depth):
        node = (node, node)
    return node


def test_an_exported_file_states_its_origin_without_loading(tmp_path):
    checkpoints = Checkpoints(tmp_path, origin=Origin("run a", "config a"))
    path = checkpoints.save(12, _state(1))
    assert checkpoints.header(12) == (alfish.__version__, checkpoint_file.SCHEMA, "run a", "config a", 12)
    _without_header(path)
    assert checkpoints.header(12) == ("", 0, None, None, 12)
    assert _value(checkpoints.load(config="config b")) == (12, 1)  # of older files nothing is known


def test_files_of_other_runs_are_refused_not_skipped(tmp_path):
    Checkpoints(tmp_path, origin=Origin("run a", "config a")).save(1, _state(1))
    Checkpoints(tmp_path, origin=Origin("run b", "config b")).save(2, _state(2))
    ours = Checkpoints(tmp_path, origin=Origin("run a"))
    assert _value(ours.load(1, config="config a")) == (1, 1)
    for which in ("latest", 2):
        with pytest.raises(UsageError, match="000002.pt is a checkpoint of another run .*run b.*run a.*move it away"):
            ours.load(which)
    with pytest.raises(UsageError, match="000001.pt was saved with a configuration other.*on_config_change='new'"):
        ours.load(1, config="config b")
    assert _value(Checkpoints(tmp_path).load()) == (2, 2)  # where nobody says which run it is, any will do


def _forge_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def _forge_a_link(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def _forge_a_directory(path):
    path.unlink()
    path.mkdir()


# What is done to the file at 20 steps, and the words about it.
FORGED = {
    "renamed": (lambda path: path.replace(path.with_name("checkpoint-000000000030.pt")), "saved at 20 steps.*renamed"),
    "newer": (
        lambda path: _with_header(path, schema=99, alfish="7.1"),
        "by a newer version of alfish .7.1 with",
    ),
    "header": (lambda path: _with_header(path, schema="one"), "damaged header"),
    "terminal": (lambda path: _with_header(path, schema=99, alfish="\x1b[2J"), "damaged header"),
    "long run": (lambda path: _with_header(path, run="x" * 1000), "damaged header"),
    "not text": (lambda path: _with_header(path, config=[1]), "damaged header"),
    "a key with an escape": (
        lambda path: path.write_bytes(_signed(_saved({"counters": {}, "\x1b[2J": 1}))),
        "does not have .*is missing",
    ),
    "pipe": (_forge_a_pipe, "cannot be read .it is not a regular file"),
    "endless": (_forge_a_link, "cannot be read .it is not a regular file"),
    "directory": (_forge_a_directory, "cannot be read"),
    "no zip": (
        lambda path: path.write_bytes(_signed(b"x" * 1000)),
        "does not have the contents that this version of alfish saves .*zip",
    ),
    "compressed": (
        lambda path: path.write_bytes(_signed(_compressed({"weight": torch.zeros(2**22)}))),
        "does not have .*it is compressed",
    ),
    "expanded": (
        lambda path: path.write_bytes(_signed(_saved({"weight": torch.zeros(1).expand(2**40)}))),
        "does not have .*declares a tensor of 4398046511104 bytes",
    ),
    "shared": (lambda path: path.write_bytes(_signed(_saved(_tree(34)))), "does not have .*entries"),
    "another kind": (
        lambda path: path.write_bytes(_signed(_saved([1, 2]))),
        "does not have .*indices must be integers",
    ),
    "a missing key": (
        lambda path: path.write_bytes(_signed(_saved({"a": 1}))),
        "does not have .*'counters' is missing",
    ),
}


@pytest.mark.parametrize("forge", FORGED)
def test_a_file_with_other_content_is_named_and_skipped(tmp_path, caplog, forge):
    change, words = FORGED[forge]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, _state(1))
    change(checkpoints.save(20, _state(2)))
    newest = checkpoints.steps()[-1]
    updates = []
    with pytest.raises(UsageError, match=words) as caught:
        checkpoints.load(newest, lambda state: updates.append(state["counters"]["updates"]))
    assert f"checkpoint-{newest:012d}.pt" in str(caught.value) and "\n" not in str(caught.value)
    assert checkpoints.load(into=lambda state: updates.append(state["counters"]["updates"]))[0] == 10
    assert updates == [1] and "FALLING BACK to checkpoint-000000000010.pt" in caplog.text


def test_states_that_hold_much_are_not_taken_for_forged(tmp_path):
    state = {"many": [None] * 10_000, "view": torch.zeros(1000)[:3], "zeros": torch.zeros(0, 2**40), "tree": _tree(5)}
    Checkpoints(tmp_path).save(1, state)
    assert torch.equal(Checkpoints(tmp_path).load()[1]["view"], torch.zeros(3))


def test_a_state_may_stay_in_its_file_until_it_is_read(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, {"rows": torch.arange(1000)})

    def mapped():
        return str(path) in Path("/proc/self/maps").read_text()

    _, state = checkpoints.load(mmap=True)
    assert mapped() and torch.equal(state["rows"], torch.arange(1000))
    del state
    assert not mapped()
    loaded = checkpoints.load()
    assert not mapped() and loaded[0] == 1


def test_plain_values_of_another_kind_are_named():
    example = {"counters": {"steps": 0, "best": None, "seconds": 0.0}, "window": [], "kept": torch.zeros(())}
    check_like({"counters": {"steps": 3, "best": 2.0, "more": "x"}, "window": (1, "a"), "kept": torch.ones(2)}, example)
    for state, words in [
        ({"counters": {"steps": "3"}}, "counters.steps is a str, not a int"),
        ({"counters": {"steps": True}}, "counters.steps is a bool, not a int"),
        ({"counters": 3}, "counters is a int, not a dict"),
        ({"window": {}}, "window is a dict, not a list"),
        ({"kept": 1.0}, "kept is a float, not a Tensor"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_like(state, example)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("step", [10, 20])
def test_a_kill_before_the_rename_leaves_the_previous_checkpoint_intact(tmp_path, caplog, step):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, _state(1))
    process = os.fork()
    if not process:
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(step, _state(0))
        os._exit(0)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    [leftover] = tmp_path.glob(".*.tmp")
    assert leftover.stat().st_size > 0
    assert checkpoints.steps() == [10]
    assert _value(checkpoints.load()) == (10, 1)
    assert caplog.records == []
    checkpoints.save(30, _state(3))
    assert not leftover.exists()


def test_a_failing_disk_leaves_the_previous_content_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "best.json"
    write_atomically(path, "before")

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(files.DiskError, match=f"{tmp_path} cannot be written to: No space left on device .best.json"):
        write_atomically(path, b"after")
    assert [entry.name for entry in tmp_path.iterdir()] == ["best.json"]
    assert path.read_text() == "before"


def test_content_is_synced_before_renaming_and_the_name_before_returning(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        calls.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def record_replace(*paths):
        calls.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_atomically(tmp_path / "x", "text")
    assert calls == ["file", "rename", "directory"]


def test_the_newest_the_best_and_the_milestones_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_period=100)
    for step in range(0, 480, 30):  # milestones: 120 (at or past 100), 210, 300, 420
        checkpoints.save(step, _state(step), best=step == 60)
    assert checkpoints.steps() == [60, 120, 210, 300, 420, 450]
    assert _value(checkpoints.load("best")) == (60, 60)
    checkpoints.mark_best(450)
    checkpoints.save(480, _state(480))
    assert checkpoints.steps() == [120, 210, 300, 420, 450, 480]
    reopened = Checkpoints(tmp_path, keep_last=1)  # which remembers the best, and now wants no milestones
    reopened.save(490, _state(490))
    assert reopened.steps() == [450, 490]
    assert reopened.load("best")[0] == 450


def test_a_rewound_run_continues_from_where_it_was_rewound_to(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_period=100)
    for step in (100, 200, 300):
        checkpoints.save(step, _state(step))
    checkpoints.load(100)
    checkpoints.save(150, _state(150))
    assert checkpoints.steps() == [100, 150]
    assert _value(checkpoints.load()) == (150, 150)
    assert len(list(tmp_path.glob("*.superseded"))) == 2  # renamed, for nobody asked to delete them
    assert "checkpoint-000000000300.pt is later than the 150" in caplog.text
    for step in (50, 25):  # but two are enough
        checkpoints.save(step, _state(step))
    names = sorted(path.name for path in tmp_path.glob("*.superseded"))
    assert names == ["checkpoint-000000000200.pt.superseded", "checkpoint-000000000300.pt.superseded"]


def test_an_unreadable_best_note_does_not_stop_saving(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "best.json").write_text("{")
    checkpoints.save(1, _state(1))
    assert "best.json is not JSON" in caplog.text


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (np.float64(1), "numpy.float64"),
        (np.zeros(2), "numpy.ndarray"),
        (namedtuple("Pair", "a b")(1, 2), "Pair"),
        (len, "builtin_function_or_method"),
    ],
)
def test_an_unloadable_leaf_is_named_before_writing(tmp_path, leaf, kind):
    with pytest.raises(UsageError, match=rf"'metrics\.0\.window' is a .*{kind}"):
        Checkpoints(tmp_path).save(1, {"metrics": [{"window": leaf}]})
    assert list(tmp_path.iterdir()) == []


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_last=0"):
        Checkpoints(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="-1"):
        Checkpoints(tmp_path).save(-1, {})


def test_a_checkpoint_of_another_architecture_is_refused_completely():
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(3, 3, bias=False))
    with pytest.raises(UsageError) as caught:
        load_model(module, other.state_dict(), "PPO")
    message = str(caught.value)
    assert "does not fit PPO" in message
    assert "unexpected 2.weight" in message
    assert "1.weight is [3, 8] float32 in the checkpoint and [2, 8] float32 here" in message
    assert "\n" not in message
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])  # the first layer fits, and was not loaded all the same
    with pytest.raises(UsageError, match=r"missing 0.weight; missing 0.bias; missing 1.weight; and 1 more"):
        load_model(module, {}, "PPO")


def test_a_model_is_loaded_in_place():
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    weight = module.weight
    load_model(module, other.state_dict(), "PPO")
    assert module.weight is weight
    assert torch.equal(weight, other.weight)


def test_every_generator_continues_where_it_was(tmp_path):
    def draw():
        # gauss and normal hold a second number back, which is state too
        numbers = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()]
        return numbers, torch.rand(3).tolist(), torch.randn(3).tolist()

    random.gauss(0, 1)
    np.random.normal()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"rng": rng_state()})
    expected = draw()
    assert draw() != expected
    set_rng_state(checkpoints.load()[1]["rng"])
    assert draw() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_generators_of_gpus_continue_where_they_were(tmp_path):
    torch.rand(1, device="cuda")
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, rng_state())
    expected = torch.rand(3, device="cuda")
    set_rng_state(checkpoints.load()[1])
    assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_generators_of_gpus_that_are_not_here_are_mentioned(caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    set_rng_state({**rng_state(), "cuda": [torch.zeros(16, dtype=torch.uint8)]})
    assert "1 GPU generators were saved, but this machine has 0 GPUs" in caplog.text


def test_a_directory_lock_lasts_until_its_holder_ends(tmp_path, monkeypatch):
    class Holder:
        pass

    holders = [Holder(), Holder()]
    unlock = files.lock(tmp_path, holders[0])
    assert files.lock(tmp_path, holders[1]) is None
    unlock()
    assert files.lock(tmp_path, holders[0]) is not None
    del holders[0]
    assert files.lock(tmp_path, holders[0]) is not None

    def refuse(*arguments):
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert files.lock(tmp_path, holders[0]) is not None
