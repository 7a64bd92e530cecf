"""Damaged and forged files of every source: each is read, or refused in one sentence that names it."""

import functools
import hashlib
import io
import pickle
import resource
import sys
import types
import zipfile

import numpy as np
import pytest
import test_alf
import test_sb3
from data_sets import NEEDS_MINARI, STAMPED, TOY, trained, written
from recorded import SPACES, record, table_of
from test_sources import states_of

from alfish.errors import UsageError
from alfish.offline import OfflineBuffer
from alfish.runs.checkpoints import Checkpoints

NUM_CASES = 16  # of each source; the long test has 200
MAX_GROWTH = 2**30  # bytes of memory that all cases of a source may add


def flip(content, generator):
    """One bit."""
    changed = bytearray(content)
    changed[generator.integers(len(content))] ^= 1 << generator.integers(8)
    return bytes(changed)


def overwrite(content, generator):
    """Some bytes with those that numbers and sizes are forged with."""
    at, value = (
        generator.integers(len(content)),
        generator.choice([b"\xff" * 4, b"\x00" * 8, b"\xff\xff\xff\x7f", b"9"]),
    )
    return content[:at] + value + content[at + len(value) :]


def cut_off(content, generator):
    return content[: generator.integers(len(content))]


def swap(content, generator):
    """Two fields of eight bytes."""
    one, other = sorted(int(at) for at in generator.integers(0, max(1, len(content) - 8), 2))
    a, b = content[one : one + 8], content[other : other + 8]
    if other - one < 8:
        return flip(content, generator)
    return content[:one] + b + content[one + 8 : other] + a + content[other + 8 :]


def remove(content, generator):
    at = generator.integers(len(content))
    return content[:at] + content[at + generator.integers(1, 30) :]


CHANGES = (flip, flip, overwrite, overwrite, swap, remove, cut_off)


def damaged(content, generator):
    for _ in range(generator.integers(1, 4)):
        content = CHANGES[generator.integers(len(CHANGES))](content, generator) or b"\0"
    return content


def in_zip(content, generator):
    """Damage to a part of a zip file, whose table of contents and checksums are right again."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(written, "w") as after:
        names = before.namelist()
        chosen = names[generator.integers(len(names))]
        if generator.random() < 0.5:  # where most of the structure is
            chosen = next((name for name in names if name.endswith("data.pkl")), chosen)
        for name in names:
            part = before.read(name)
            after.writestr(name, damaged(part, generator) if name == chosen and part else part)
    return written.getvalue()


def signed(content, generator):
    """Damage to a checkpoint, whose header stays and whose checksum is right again."""
    start, trailer = content.rindex(b"\nalfish checkpoint "), content.rindex(b"\nalfish sha256 ")
    changed = in_zip(content, generator) + content[start:trailer]
    return changed + b"\nalfish sha256 " + hashlib.sha256(changed).hexdigest().encode() + b"\n"


def npz(directory):
    np.savez(directory / "a.npz", **table_of(record(4)))
    return f"npz:{directory}/a.npz", directory / "a.npz", (damaged, in_zip)


def ogbench(directory):
    np.savez(directory / "a.npz", **states_of(record(4)))
    return f"ogbench:{directory}/a.npz", directory / "a.npz", (damaged, in_zip)


def sb3(directory):
    module = types.ModuleType(test_sb3.MODULE)
    module.ReplayBuffer = type("ReplayBuffer", (), {"__module__": test_sb3.MODULE})
    names = ("stable_baselines3", "stable_baselines3.common", test_sb3.MODULE)
    with pytest.MonkeyPatch.context() as patch:
        for name in names[:2]:
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, names[2], module)
        buffer = test_sb3.filled(module.ReplayBuffer, [record(4)], 20)
        (directory / "b.pkl").write_bytes(pickle.dumps(buffer))
    return f"sb3:{directory}/b.pkl", directory / "b.pkl", (damaged,)


def alf(directory):
    name = test_alf.saved(
        directory / "ckpt", test_alf.checkpoint([test_alf.rows_of(record(4))], 30), global_step=np.int64(5)
    )
    return name, directory / "ckpt", (damaged, in_zip)


def hdf5(directory, write):
    pytest.importorskip("h5py", reason="needs the extra 'hdf5'")
    import test_hdf5

    return getattr(test_hdf5, write)(directory / "a", record(4)), directory / "a", (damaged,)


def minari(directory, file):
    return written("minari:test/stamped-v0", record(4)), directory / "minari/test/stamped-v0/data" / file, (damaged,)


def lerobot(directory, file):
    pytest.importorskip("pyarrow", reason="needs the extra 'arrow'")
    import test_lerobot

    return test_lerobot.written(directory / "set", record(4)), directory / "set" / file, (damaged,)


def own(directory, file):
    name = written(directory / "set", record(4))
    return name, directory / "set" / file, (damaged, signed) if file.endswith(".pt") else (damaged,)


def run(directory):
    name = trained(directory, TOY + STAMPED.format(truncates=False, steps=40))
    step = Checkpoints(directory / "run/replay").steps()[-1]
    return name, directory / f"run/replay/checkpoint-{step:012d}.pt", (damaged, signed)


SOURCES = {
    "npz": npz,
    "ogbench": ogbench,
    "sb3": sb3,
    "alf": alf,
    "d4rl": functools.partial(hdf5, write="d4rl"),
    "d3rlpy": functools.partial(hdf5, write="d3rlpy"),
    "minari's rows": functools.partial(minari, file="main_data.hdf5"),
    "minari's metadata": functools.partial(minari, file="metadata.json"),
    "lerobot's rows": functools.partial(lerobot, file="data/chunk-000/file-000.parquet"),
    "lerobot's metadata": functools.partial(lerobot, file="meta/info.json"),
    "alfish's rows": functools.partial(own, file="episodes/checkpoint-000000000000.pt"),
    "alfish's index": functools.partial(own, file="data_set.json"),
    "run": run,
}


@pytest.mark.filterwarnings("ignore:.*(gymnasium|env_spec|set to None|Box|precision)")  # gymnasium's and Minari's
@pytest.mark.parametrize("source", [pytest.param(name, marks=[NEEDS_MINARI] * ("minari" in name)) for name in SOURCES])
@pytest.mark.parametrize("num_cases", [NUM_CASES, pytest.param(200, marks=pytest.mark.long)])
def test_any_damaged_file_is_read_or_refused_in_a_sentence_with_its_name(tmp_path, home, source, num_cases):
    name, path, kinds = SOURCES[source](tmp_path)
    where, content, generator = name.partition(":")[2], path.read_bytes(), np.random.default_rng(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_refused = 0
    for case in range(num_cases):
        path.write_bytes(kinds[case % len(kinds)](content, generator))
        try:
            OfflineBuffer([name], policy="drop_episode" if case % 3 else "warn", spaces=SPACES).check_valid()
        except UsageError as error:
            sentence = str(error)
            assert where in sentence or str(path) in sentence, (case, sentence)
            assert "\n" not in sentence and len(sentence) < 3000, (case, sentence)
            num_refused += 1
        except BaseException as error:
            error.add_note(f"of case {case}") if hasattr(error, "add_note") else None
            raise
    assert num_refused
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH
