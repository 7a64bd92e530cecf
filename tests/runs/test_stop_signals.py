"""SIGTERM and Ctrl-C during every wait of a run: it ends with what is whole."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from toys import OneState

from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.environments import make_environment
from alfish.errors import RunError
from alfish.learner.batches import EpochBatches
from alfish.networks import MLP, ActorCritic, Torso
from alfish.runs import stop_signals
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.stop_signals import Interrupted, StopSignals
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver, Evaluate
from alfish.training.trainer import Trainer

FOREVER = 10_000  # seconds, which no test waits for
torso = functools.partial(Torso, mlp=functools.partial(MLP, layers=(8,)))
network = functools.partial(ActorCritic, actor_torso=torso, critic_torso=torso)


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch):
    monkeypatch.setattr(stop_signals, "GRACE_SECONDS", 0.04)
    monkeypatch.setattr(stop_signals, "LOOK_SECONDS", 0.01)


def hang(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    time.sleep(FOREVER)


def make(root_dir, env_id, **options):
    environment = options.pop("environment", functools.partial(make_environment, env_id, num_envs=1))
    defaults = {
        "algorithm": functools.partial(PPO, network=network),
        "environment": environment,
        "batches": functools.partial(EpochBatches, num_epochs=1, minibatch_size=8),
        "listeners": [CheckpointSaver(0)],
        "unroll_length": 8,
        "num_iterations": 50,
        "device": "cpu",
    }
    return Trainer(root_dir, **{**defaults, **options})


# The signals themselves.


def test_a_wait_is_interrupted_again_if_the_error_was_swallowed():
    with StopSignals(lambda: None) as signals, pytest.raises(Interrupted), signals.breaking():
        try:
            hang()
        except BaseException:  # of somebody's who takes no end for an answer
            assert signals.number == signal.SIGTERM
        time.sleep(FOREVER)


def test_nothing_is_interrupted_where_interruption_is_not_allowed():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(lambda: None) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.15)  # longer than the grace
        with pytest.raises(Interrupted):
            signals.check()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before and signal.set_wakeup_fd(-1) == -1


IN_C = """
import ctypes, os, signal, sys, warnings
warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
number = int(sys.argv[1])
from alfish.runs import stop_signals
stop_signals.GRACE_SECONDS = stop_signals.STUCK_SECONDS = 0.1
stop_signals.LOOK_SECONDS = 0.01
with stop_signals.StopSignals(lambda: print("saved", flush=True)) as signals:
    if os.fork() == 0:
        mine = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
        os._exit([*mine, signal.set_wakeup_fd(-1)] != [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN, -1])
    print("child", os.wait()[1], flush=True)
    with signals.breaking():
        mutex = ctypes.create_string_buffer(256)
        os.kill(os.getpid(), number)
        while True:
            ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second time for ever, whatever signals come
"""


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_a_main_thread_stuck_in_c_code_ends_with_the_last_whole_state(number, status):
    """And a forked child answers for itself."""
    command = [sys.executable, "-c", IN_C, str(int(number))]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout, process.stderr) == (status, "child 0\nsaved\n", "")


# Environments in the trainer's process.


class Hanging(OneState):
    """Hangs at its step `at`, or where that is 'reset' or 'close'."""

    def __init__(self, at, number=signal.SIGTERM):
        super().__init__()
        self._at, self._number, self._count = at, number, 0

    def reset(self, **arguments):
        if self._at == "reset":
            hang(self._number)
        return super().reset(**arguments)

    def step(self, action):
        self._count += 1
        if self._count == self._at:
            hang(self._number)
        return super().step(action)

    def close(self):
        if self._at == "close":
            time.sleep(FOREVER)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_environment_that_hangs_is_interrupted_and_the_last_iteration_is_saved(tmp_path, number, capsys):
    trainer = make(tmp_path, functools.partial(Hanging, 20, number))
    report = trainer.train()
    assert (report.iterations, report.finished, trainer.interrupted_by) == (2, True, number)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [report.env_steps]
    name = signal.Signals(number).name
    said = f"{name}: the signal broke off the iteration; rows of this iteration are lost"
    assert said in capsys.readouterr().err and said in (tmp_path / "log.txt").read_text()
    again = make(tmp_path, functools.partial(Hanging, 0), num_iterations=3)
    assert again.train().iterations == 3


def test_before_the_first_iteration_nothing_is_saved_and_nothing_is_overwritten(tmp_path):
    trainer = make(tmp_path, functools.partial(Hanging, "reset"))
    assert trainer.train().iterations == 0 and trainer.interrupted_by == signal.SIGTERM
    assert Checkpoints(tmp_path / "checkpoints").steps() == []
    make(tmp_path, functools.partial(Hanging, 0), num_iterations=2).train()
    (path,) = (tmp_path / "checkpoints").glob("*.pt")
    before = path.read_bytes()
    make(tmp_path, functools.partial(Hanging, 3)).train()
    assert path.read_bytes() == before


def test_an_environment_that_does_not_close_is_left(tmp_path, capsys):
    class Stop(Listener):
        def after_iteration(self, trainer, report):
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = make(tmp_path, functools.partial(Hanging, "close"), listeners=[CheckpointSaver(0), Stop()])
    trainer.train()
    assert "SyncUnroller did not close in time after SIGTERM" in capsys.readouterr().err
    assert len(Checkpoints(tmp_path / "checkpoints").steps()) == 1


def test_an_evaluation_that_hangs_is_interrupted_and_repeated_later(tmp_path, capsys):
    trainer = make(
        tmp_path,
        OneState,
        evaluation_environment=functools.partial(make_environment, functools.partial(Hanging, 3)),
        listeners=[CheckpointSaver(0), Evaluate(16, num_episodes=1)],
    )
    report = trainer.train()
    assert report.finished and Checkpoints(tmp_path / "checkpoints").steps() == [report.env_steps]
    assert "Evaluate was interrupted by SIGTERM" in capsys.readouterr().err
    again = make(tmp_path, OneState, listeners=[Evaluate(16, num_episodes=1)], num_iterations=report.iterations + 1)
    last = again.train()
    names = sorted(path.name for path in (tmp_path / "eval").iterdir())
    assert names == [f"evaluation-{steps:012d}.csv" for steps in (16, last.env_steps)]


def test_loading_data_can_be_interrupted(tmp_path):
    class Loading(EpochBatches):
        def start(self, environment):
            hang()

    trainer = make(tmp_path, OneState, batches=functools.partial(Loading, num_epochs=1))
    assert trainer.train() is None and trainer.interrupted_by == signal.SIGTERM
    assert make(tmp_path, OneState, num_iterations=1).train().finished  # the directory is free


# Environments in other processes.


class Signalling(OneState):
    """In a process of its own, signals it and the trainer at its 20th step."""

    def __init__(self, home, number, freezes=False):
        super().__init__()
        self._home, self._number, self._freezes, self._count = home, number, freezes, 0

    def step(self, action):
        self._count += 1
        if self._count == 20 and os.getpid() != self._home:
            os.kill(self._home, self._number)
            os.kill(os.getpid(), self._number)
            if self._freezes:
                os.kill(os.getpid(), signal.SIGSTOP)
        return super().step(action)


@pytest.mark.parametrize("number, freezes", [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGTERM, False)])
def test_signals_to_all_processes_end_a_run_with_environments_in_gymnasiums_processes(tmp_path, number, freezes):
    env_id = functools.partial(Signalling, os.getpid(), number, freezes)
    environment = functools.partial(make_environment, env_id, vectorization="async")
    trainer = make(tmp_path, None, environment=environment, unroll_length=8)
    processes = trainer.environment.env.processes
    report = trainer.train()
    assert report.finished and trainer.interrupted_by == number
    assert Checkpoints(tmp_path / "checkpoints").steps() == [report.env_steps] and report.env_steps > 0
    for process in processes:
        process.join(60)
        assert not Path(f"/proc/{process.pid}").exists()
    again = make(tmp_path, None, environment=environment, num_iterations=report.iterations)
    again.train()


# sys.exit.


class Exiting(OneState):
    def __init__(self, at):
        super().__init__()
        self._at, self._count = at, 0

    def step(self, action):
        self._count += 1
        if self._count == self._at:
            sys.exit(0)
        return super().step(action)


@pytest.mark.filterwarnings("ignore:.*(ERROR|WARN).*:UserWarning")  # gymnasium's, of the process
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environment_that_exits_ends_the_run_with_an_error_and_a_checkpoint(tmp_path, vectorization):
    environment = functools.partial(make_environment, functools.partial(Exiting, 20), vectorization=vectorization)
    trainer = make(tmp_path, None, environment=environment)
    with pytest.raises(
        RunError, match=rf"sys.exit\(0\) was called in step \({__file__}:\d+\), but code that runs inside"
    ):
        trainer.train()
    assert len(Checkpoints(tmp_path / "checkpoints").steps()) == 1
    assert "sys.exit(0) was called in step" in (tmp_path / "log.txt").read_text()


def test_an_environment_that_exits_in_evaluation_does_too(tmp_path):
    evaluation = functools.partial(make_environment, functools.partial(Exiting, 2))
    trainer = make(tmp_path, OneState, evaluation_environment=evaluation, listeners=[Evaluate(8, num_episodes=1)])
    with pytest.raises(RunError, match=r"sys.exit\(0\) was called in step"):
        trainer.train()
    assert len(Checkpoints(tmp_path / "checkpoints").steps()) == 1


def test_a_tolerated_exit_rebuilds_the_environment():
    environment = make_environment(functools.partial(Exiting, 2))
    errors = []
    environment.tolerate_errors(lambda index, error: errors.append((index, type(error))))
    environment.reset()
    action = np.zeros(1, np.int64)
    assert [environment.step(action).step_type.item() for _ in range(3)] == [1, 0, 1] and errors == [(0, SystemExit)]


def test_a_command_ends_with_1_where_an_environment_exits(tmp_path, monkeypatch, capsys):
    (tmp_path / "exiting.py").write_text(
        "import gymnasium, sys\n"
        "class Env(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 1, (1,))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, **arguments):\n"
        "        sys.exit(0)\n"
        "gymnasium.register('Exiting-v0', Env)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-env", "--env_id=exiting:Exiting-v0"]) == 1
    captured = capsys.readouterr()
    assert "problem      sys.exit(0) was called in reset (" in captured.out and "Traceback" not in captured.err
