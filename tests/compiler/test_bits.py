"""The same bits whatever the compiler, its cache and the cores do, with the process that compiles itself.

`tests/learner/test_compiled_later.py` holds the rules of the switch with a stand-in for that process.
"""

import contextlib
import csv
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from alfish.algorithms.dqn import DQN
from alfish.compiler import background, cache, kernels
from alfish.environments import make_environment
from alfish.learner import compiled_later
from alfish.learner.batches import ReplayBatches
from alfish.learner.compiled_updates import CompiledUpdates
from alfish.learner.learner import Learner
from alfish.networks import MLP, QNetwork, Torso
from alfish.training.listeners import CheckpointSaver
from alfish.training.summaries import Summaries
from alfish.training.trainer import Trainer

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's compiler, at import
]
FIRST = 30  # the update from which on updates are compiled
TORSO = functools.partial(Torso, mlp=functools.partial(MLP, layers=()))
SMALL = {
    "algorithm": functools.partial(DQN, q_network=functools.partial(QNetwork, torso=TORSO)),
    "environment": functools.partial(make_environment, "CartPole-v1", num_envs=2),
    "batches": functools.partial(
        ReplayBatches, capacity=200, batch_size=8, warmup_env_steps=20, updates_per_env_step=0.5
    ),
    "unroll_length": 4,
}


class Machine:
    """The cores, the cache and the C++ compiler of this machine, as a test wants them.

    Attributes:
      holds: file; while it exists, the C++ compiler waits.
    """

    def __init__(self, directory, monkeypatch):
        self._monkeypatch = monkeypatch
        self._use_helpers, self._wait = kernels.use_helpers, CompiledUpdates.wait
        self.holds, self._calls = directory / "holds", directory / "calls"
        script = directory / "compiler"
        script.write_text(
            f'#!/bin/sh\necho $* >> {self._calls}\nwhile [ -e {self.holds} ]; do sleep 0.05; done\nexec g++ "$@" -O0\n'
        )
        script.chmod(0o755)
        monkeypatch.setattr(cache, "GIVEN", None)
        for name, value in {"XDG_CACHE_HOME": str(directory / "cache"), "CXX": str(script)}.items():
            monkeypatch.setenv(name, value)
        # It is not nicer than training, which waits for it.
        monkeypatch.setattr(background, "PROGRAM", f"import os; os.nice = abs; {background.PROGRAM}")
        monkeypatch.setattr(compiled_later, "first_compiled_update", lambda work: FIRST)
        monkeypatch.setattr(compiled_later, "pays_beside", lambda num_updates, work: True)

    def built(self):
        """Files that C++ compilers were started for, in order."""
        return re.findall(r" -o (\S+)\.\d+\.half", self._calls.read_text())

    def set_cores(self, number):
        """Lets 'auto' find this number of cores; helpers do not give way to what else runs."""
        use = self._use_helpers
        self._monkeypatch.setattr(kernels, "available_cores", lambda: number)
        self._monkeypatch.setattr(kernels, "use_helpers", lambda number: use(number, adapts=False))

    def compile_slowly(self):
        """Lets the C++ compiler begin when training already waits."""
        wait = self._wait
        self.holds.touch()
        self._monkeypatch.setattr(CompiledUpdates, "wait", lambda own: self.holds.unlink(True) or wait(own))

    def compile_at_once(self):
        """Lets training go on when its graph is ready."""
        request, wait = CompiledUpdates.request, self._wait
        self._monkeypatch.setattr(CompiledUpdates, "request", lambda own, *a: request(own, *a) or wait(own))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    before = kernels.num_threads()
    yield Machine(tmp_path, monkeypatch)
    monkeypatch.undo()
    kernels.set_num_threads(before)


def run(root, recipe, num_threads="auto", **settings):
    """A trained run: its log, metrics.csv without times, and its parameters."""
    trainer = Trainer(
        root,
        **{"num_env_steps": 200, "summary_period": 16, **recipe, **settings},
        learner=Learner,
        listeners=[Summaries([]), CheckpointSaver(period=10**6)],
        num_threads=num_threads,
    )
    trainer.train()
    return (root / "log.txt").read_text(), metrics(root), [*trainer.algorithm.parameters()]


def metrics(root):
    """Rows of metrics.csv without times."""
    with open(root / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if "time" not in k and k != "wall_seconds"} for row in rows]


def assert_equal(one, other):
    (_, rows, parameters), (_, others, same) = one, other
    assert rows == others and len(rows) > 5
    assert all(torch.equal(a, b) for a, b in zip(parameters, same, strict=True))


@pytest.mark.slow
def test_results_do_not_depend_on_cache_compiler_speed_or_cores(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # without vectors the other process compiles less
    machine.set_cores(1)
    machine.compile_slowly()
    empty = run(tmp_path / "empty", SMALL)
    built = machine.built()
    assert built and "Waiting at update" in empty[0]
    machine.set_cores(2)
    machine.compile_at_once()
    full = run(tmp_path / "full", SMALL)
    assert machine.built() == built and "Waiting at update" not in full[0]
    assert all("Using the compiled update of DQN" in log for log, *_ in (empty, full))
    assert_equal(empty, full)


def processes_of_group(group):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def wait_until(holds):
    deadline = time.monotonic() + 600
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert holds()


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_bits
from alfish.learner import compiled_later
compiled_later.first_compiled_update = lambda work: test_bits.FIRST
compiled_later.pays_beside = lambda num_updates, work: True
test_bits.run(Path(sys.argv[2]), test_bits.SMALL)
"""


@contextlib.contextmanager
def start(root):
    """Runs `SMALL` in a process of its own, and kills it at the end."""
    command = [sys.executable, "-c", PROGRAM, os.path.dirname(__file__), str(root)]
    with subprocess.Popen(command, env=cache.environment(), stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def compiler_group(pid):
    """The process group of a training process's compiler; None: there is none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


@pytest.mark.long
@pytest.mark.parametrize("all_at_once", [False, True], ids=["training", "the compiler too"])
def test_a_killed_run_leaves_no_process_or_partial_graph(machine, tmp_path, all_at_once):
    """While g++ works; if it is killed too, it cannot remove what it has half written."""
    half = tmp_path / "half"
    (tmp_path / "compiler").write_text(  # writes half an output before the whole
        '#!/bin/sh\nfor word; do if [ "$last" = -o ]; then printf half > "$word"; '
        f'echo "$word" >> {half}; while [ -e {machine.holds} ]; do sleep 0.05; done; fi; last=$word; done\n'
        'exec g++ "$@" -O0\n'
    )
    machine.holds.touch()
    with start(tmp_path / "killed") as killed:
        wait_until(half.exists)
        group = compiler_group(killed.pid)
        assert len(processes_of_group(group)) > 1
        if all_at_once:
            os.killpg(group, signal.SIGKILL)
        killed.kill()
    wait_until(lambda: not processes_of_group(group))
    for output in half.read_text().split():  # this compiler removes nothing
        assert Path(output).read_text() == "half" and output.endswith(".half")
    machine.holds.unlink()
    next_one = run(tmp_path / "next", SMALL)
    assert "Using the compiled update of DQN" in next_one[0]
    assert_equal(next_one, run(tmp_path / "full", SMALL))


@pytest.mark.long
def test_only_one_of_several_runs_compiles_the_graph(machine, tmp_path):
    with start(tmp_path / "one") as one, start(tmp_path / "other") as other:
        assert not one.wait() and not other.wait()
    built = machine.built()
    full = run(tmp_path / "full", SMALL)
    assert machine.built() == built and len(built) == len(set(built))
    for name in ("one", "other"):
        assert metrics(tmp_path / name) == full[1]
        assert "Using the compiled update of DQN" in (tmp_path / name / "log.txt").read_text()
