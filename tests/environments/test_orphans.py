"""Processes of environments end with a trainer that was killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, sys, time
import gymnasium, numpy
from gymnasium import spaces
from alfish.environments import make_environment

class Slow(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
    def reset(self, seed=None, options=None):
        return numpy.zeros(2, numpy.float32), {}
    def step(self, action):
        os.write(1, f"{os.getpid()}{os.linesep}".encode())  # one write, because two processes share the pipe
        time.sleep(60)

environment = make_environment(Slow, num_envs=2, vectorization="async")
environment.reset()
environment.step(numpy.zeros(2, int))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends processes with their parent")
def test_processes_of_async_environments_end_with_a_trainer_that_was_killed():
    trainer = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    pids = [int(trainer.stdout.readline()) for _ in range(2)]
    try:
        trainer.kill()
        trainer.wait()
        end = time.monotonic() + 10
        while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
            time.sleep(0.05)
        assert not alive
    finally:
        trainer.stdout.close()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # nobody may wait for it in a container
    except FileNotFoundError:
        return False
