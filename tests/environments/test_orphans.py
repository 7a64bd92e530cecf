"""Processes of environments end with a trainer that was killed."""

import os
import signal
import sys
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from alfish.environments import make_environment


class Slow(gymnasium.Env):
    """Its step adds the process id to a file, and takes a minute."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def __init__(self, path):
        self._path = path

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        with open(self._path, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(60)


def step(path):
    environment = make_environment(Slow, num_envs=2, vectorization="async", env_kwargs={"path": path})
    environment.reset()
    environment.step(np.zeros(2, int))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends processes with their parent")
def test_processes_of_async_environments_end_with_a_trainer_that_was_killed(tmp_path):
    path = tmp_path / "pids"
    path.touch()
    trainer = os.fork()
    if trainer == 0:
        try:
            step(str(path))
        finally:
            os._exit(1)
    pids = []
    try:
        began = time.monotonic()
        while len(pids) < 2:
            assert time.monotonic() - began < 60
            time.sleep(0.05)
            pids = [int(line) for line in path.read_text().split("\n")[:-1]]
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        end = time.monotonic() + 10
        while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
            time.sleep(0.05)
        assert not alive
    finally:
        for pid in filter(is_alive, [trainer, *pids]):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # nobody may wait for it in a container
    except FileNotFoundError:
        return False
