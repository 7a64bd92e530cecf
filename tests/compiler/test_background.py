"""The process that compiles beside training: it answers, it dies alone, and it never outlives the run."""

import errno
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import gin
import pytest
import torch
from torch import nn

from alfish.compiler import background, compiling_process, inductor, kernels
from alfish.compiler.background import PROGRAM, BackgroundCompiler, Compilation, NotSendable
from alfish.compiler.compiling_process import Answer
from alfish.compiler.inductor import NotCompilable
from alfish.configuration import reading

ARGUMENT = torch.ones(3)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++")


class Waiting(nn.Module):
    """Another process would take a minute to trace it."""

    notes = None

    def forward(self, given):
        time.sleep(60)
        return given


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holds()


def wait_for_the_end_of(pid):
    wait_until(lambda: not is_running(pid))


@pytest.fixture
def compiler():
    compiler = BackgroundCompiler()
    yield compiler
    compiler.close()


def test_a_process_that_is_killed_is_reported(compiler):
    compilation = compiler.request(Waiting(), ARGUMENT, "float32")
    assert not compilation.is_ready
    os.kill(compiler._process.pid, signal.SIGKILL)
    compilation.wait()
    assert compilation.is_ready
    with pytest.raises(NotCompilable, match="^the process that compiles ended by SIGKILL$"):
        compilation.result()
    compiler.request(Waiting(), ARGUMENT, "float32").wait()  # neither waits, nor starts another


def test_what_the_process_printed_last_is_in_the_message(compiler, monkeypatch):
    monkeypatch.setattr(background, "PROGRAM", "raise SystemExit('no room')")
    with pytest.raises(NotCompilable, match=r"^the process that compiles ended with exit code 1 \(no room\)$"):
        compiler.request(Waiting(), ARGUMENT, "float32").result()


def test_a_process_that_takes_too_long_is_given_up(compiler, monkeypatch):
    monkeypatch.setattr(background, "LONGEST_SECONDS", 0.0)
    with pytest.raises(NotCompilable, match="it took longer than 0 s"):
        compiler.request(Waiting(), ARGUMENT, "float32").result()


def test_closing_ends_the_process_at_once(compiler):
    compiler.request(Waiting(), ARGUMENT, "float32")
    pid = compiler._process.pid
    assert is_running(pid) and os.getpgid(pid) == pid
    compiler.close()
    compiler.close()
    assert not is_running(pid)
    compiler.request(Waiting(), ARGUMENT, "float32")  # as of a run that is continued
    assert is_running(compiler._process.pid)


def _program_with_compiler(file, then):
    """Returns a program that starts a C++ compiler, or what behaves like one: at SIGTERM it removes its file."""
    shell = f"trap 'rm {file}; exit' TERM; touch {file}; sleep 60 & wait"
    return f"import subprocess; subprocess.Popen(['sh', '-c', {shell!r}]); {then}"


def test_compilers_that_are_ended_remove_what_they_have_half_written(compiler, monkeypatch, tmp_path):
    file = tmp_path / "half"
    monkeypatch.setattr(background, "PROGRAM", _program_with_compiler(file, "import time; time.sleep(60)"))
    compiler.request(Waiting(), ARGUMENT, "float32")
    wait_until(file.exists)
    compiler.close()
    wait_until(lambda: not file.exists())


def test_processes_of_a_killed_parent_end(tmp_path):
    file = tmp_path / "half"
    program = _program_with_compiler(
        file, "import sys; from alfish.compiler.compiling_process import _end_with; _end_with(int(sys.argv[1]))"
    )
    script = (
        "import os, subprocess, sys, time; "
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())], start_new_session=True); "
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, program]) as parent:
        wait_until(file.exists)
        parent.kill()
        wait_until(lambda: not file.exists())


def test_a_process_that_does_not_end_is_killed(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(background, "END_SECONDS", 0.1)
    file = tmp_path / "begun"
    program = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(file)!r}, 'w'); "
    monkeypatch.setattr(background, "PROGRAM", program + "time.sleep(60)")
    compiler.request(Waiting(), ARGUMENT, "float32")
    wait_until(file.exists)
    pid = compiler._process.pid
    compiler.close()
    assert not is_running(pid)


@pytest.mark.parametrize("name", ["library", "kernels"])
def test_a_file_that_another_run_has_removed_is_made_again(compiler, monkeypatch, name):
    missing = {"library": "/nowhere/graph.so", "kernels": None} | {name: "/nowhere/one.so"}
    monkeypatch.setattr(compiler, "answer", lambda index: Answer(1.0, structure=None, notes=["noted"], **missing))
    monkeypatch.setattr(kernels, "_file", "")
    monkeypatch.setattr(kernels, "library", functools.cache(kernels.library.__wrapped__))
    made = Compilation(compiler, lambda: "made here", 0).result()
    assert made == ("made here", ["noted"], 1.0) and not kernels._file


def test_ending_a_forked_process_does_not_end_its_parent(compiler):
    compiler.request(Waiting(), ARGUMENT, "float32")
    child = os.fork()
    if child == 0:
        compiler.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert is_running(compiler._process.pid)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_process_ends_with_its_killed_parent_despite_an_open_socket():
    """Processes that the parent has forked may hold copies of the socket."""
    ours, theirs = socket.socketpair()
    script = (
        "import os, subprocess, sys, time; "
        "command = [sys.executable, '-c', sys.argv[1], str(os.getpid()), sys.argv[2]]; "
        "process = subprocess.Popen(command, pass_fds=[int(sys.argv[2])], start_new_session=True); "
        "print(process.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, PROGRAM, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
        wait_for_the_end_of(pid)


def test_a_function_of_the_program_itself_starts_no_process(compiler):
    class Local(Waiting):
        pass

    with pytest.raises(NotSendable, match="Local"):
        compiler.request(Local(), ARGUMENT, "float32")
    assert compiler._process is None


def test_an_unpicklable_function_starts_no_process(compiler):
    class Unpicklable:
        def __reduce__(self):
            raise RuntimeError("Tried to serialize what has no state")  # as TorchScript's modules do

    function = Waiting()
    function.part = Unpicklable()
    with pytest.raises(NotSendable, match="serialize"):
        compiler.request(function, ARGUMENT, "float32")
    assert compiler._process is None


def test_the_other_process_has_the_bindings_of_this_one(compiler, monkeypatch):
    sent = []

    def taken(request, storages):
        sent.append(request)
        raise NotSendable("enough")

    monkeypatch.setattr(background, "_to_bytes", taken)
    with reading.preserved():
        reading.read([], ["make_environment.num_envs = 7"])
        with pytest.raises(NotSendable):
            compiler.request(Waiting(), ARGUMENT, "float32")
        gin.clear_config()

        class Traced(Exception):
            pass

        def traced(*arguments):
            assert gin.query_parameter("make_environment.num_envs") == 7
            raise Traced

        monkeypatch.setattr(compiling_process, "from_bytes", lambda data: sent[0])
        monkeypatch.setattr(inductor, "CompiledFunction", traced)
        with pytest.raises(Traced):
            compiling_process._answer(b"")


def test_functions_are_not_sent_if_no_process_can_start(compiler, monkeypatch):
    def refused(*arguments, **keywords):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(background.subprocess, "Popen", refused)
    with pytest.raises(NotSendable, match="a process cannot be started .*temporarily unavailable"):
        compiler.request(Waiting(), ARGUMENT, "float32")
    assert compiler._process is None


class Product(nn.Module):
    """A product plus 1, and random numbers."""

    notes = None

    def forward(self, given):
        self.notes = ["traced"]
        return {"result": given[0] * given[1] + 1, "noise": torch.randn(3)}


@pytest.mark.slow
@needs_compiler
def test_functions_compiled_elsewhere_have_equal_results_and_draws(compiler):
    function, given = Product(), (ARGUMENT, torch.full((3,), 2.0))
    compiled = compiler.request(function, given, "float32").result()
    assert compiled.notes == ["traced"] and function.notes is None and compiled.seconds > 0
    torch.manual_seed(0)
    found = compiled.function(given)
    torch.manual_seed(0)
    expected = function(given)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if torch.__version__ >= inductor.WRAPPER_FROM_TORCH:
        assert isinstance(compiled.function, inductor.LoadedFunction)
