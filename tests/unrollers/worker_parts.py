"""Environments and algorithms that worker processes of the tests import."""

import atexit
import json
import os
import random
import signal
import sys
import threading
import time
import weakref

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toys import Stamped

from alfish.algorithms.rl_algorithm import RLAlgorithm, UnrollUse
from alfish.data import AlgStep, LossInfo
from alfish.runs.process_settings import subnormals_are_flushed


class Seeing(RLAlgorithm):
    """Acts by what it sees; `info` repeats it, with the weight that the policy had."""

    on_policy = True
    unroll_use = UnrollUse(handles_stale_policies=True)
    delay = 0.0  # seconds a training step

    def __init__(self, *specs):
        super().__init__(*specs)
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def rollout_step(self, time_step, state):
        observation = time_step.observation.reshape(len(time_step.reward), -1)
        action = observation.sum(-1).long() % int(self.action_spec.n)
        return AlgStep(action, state, {"seen": observation, "weight": self.weight.sum().expand(len(observation))})

    def train_step(self, experience, state):
        time.sleep(self.delay)
        return AlgStep()

    def calc_loss(self, experience, info):
        return LossInfo(-self.weight.sum() + torch.zeros(experience.time_step.reward.shape))


class SeeingOffPolicy(Seeing):
    on_policy = False
    unroll_use = UnrollUse()

    def calc_loss(self, experience, info):
        return LossInfo(-self.weight.sum() + torch.zeros(1, experience.time_step.reward.shape[1]))


class Slowed(Seeing):
    delay = 0.02


class Pushing(Seeing):
    """For one Box entry."""

    def rollout_step(self, time_step, state):
        return AlgStep(-time_step.observation[:, :1], state)


class Diverged(SeeingOffPolicy):
    """Chooses actions that are not finite, after its first steps."""

    def rollout_step(self, time_step, state):
        action = torch.where(time_step.observation > 2, torch.nan, 0.5)
        return AlgStep(action, state, {"seen": time_step.observation})


class NotCorrecting(Seeing):
    unroll_use = UnrollUse()


class Failing(Seeing):
    """A policy that raises: a defect of the algorithm, which no new process mends."""

    def rollout_step(self, time_step, state):
        if time_step.observation[:, 2].max() >= 2:
            raise ZeroDivisionError("the policy is at fault")
        return super().rollout_step(time_step, state)


class Faulty(Stamped):
    """Goes wrong at step `at` of its `episode`, once for all environments that share the file `once`.

    Args:
      kind: 'raise', 'hang', 'nan', 'inf_reward', 'shape', 'exit', or at the reset that begins the episode, 'reset' and
        'nan_reset'.
      once: a path that exists after the first time; None: every time.
    """

    def __init__(self, kind, at=3, episode=1, once=None):
        super().__init__((5, 7, 4))
        self._kind, self._at, self._fault_episode, self._once = kind, at, episode, once

    def reset(self, **arguments):
        if self._kind == "reset" and self._episode + 1 == self._fault_episode and self._now():
            raise RuntimeError("broken on purpose")
        observation, info = super().reset(**arguments)
        if self._kind == "nan_reset" and self._episode == self._fault_episode and self._now():
            observation = np.full(3, np.nan, np.float32)
        return observation, info

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        at_reset = self._kind in ("reset", "nan_reset")
        if self._step == self._at and self._episode == self._fault_episode and not at_reset and self._now():
            if self._kind == "raise":
                raise RuntimeError("broken on purpose")
            if self._kind == "hang":
                time.sleep(1000)
            if self._kind == "exit":
                os._exit(3)
            if self._kind == "nan":
                observation = np.full(3, np.nan, np.float32)
            if self._kind == "inf_reward":
                reward = np.inf
            if self._kind == "shape":
                observation = observation[:2]
        return observation, reward, terminated, truncated, info

    def _now(self):
        if self._once is None:
            return True
        try:
            os.close(os.open(self._once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def failing_once(base, kinds, home, directory, arguments):
    """In a worker, an environment of the first of `kinds` that was not built yet, and then those that never fail.

    Args:
      base: `Faulty` or a class like it.
      home: process id of the trainer.
      directory: of files that tell which kinds have been built.
      arguments: of `base`.
    """
    if os.getpid() != home:
        for kind in kinds:
            try:
                os.close(os.open(os.path.join(directory, kind), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return base(kind, **arguments)
    return base("none", **arguments)


class Infinite(Stamped):
    """From its `episode` on, the first observations are infinite, of whatever is built in its place too.

    Args:
      path: of a file that tells of this.
    """

    def __init__(self, path, episode):
        super().__init__((3,))
        self._path, self._fault_episode = path, episode

    def reset(self, **arguments):
        observation, info = super().reset(**arguments)
        if self._episode == self._fault_episode:
            open(self._path, "w").close()
        return np.full(3, np.inf, np.float32) if os.path.exists(self._path) else observation, info


class Unbuildable(gymnasium.Env):
    """Its constructor fails in a worker, and not in the process that `home` names."""

    def __new__(cls, home):
        if os.getpid() != home:
            raise ValueError("no such robot")
        return Stamped()


class Curriculum(Stamped):
    """Its observation's first entry is the progress that it was told."""

    def __init__(self):
        super().__init__((4,))
        self._progress = -1.0

    def set_progress(self, progress):
        self._progress = progress

    def _observation(self):
        return np.array([self._progress, self._episode, self._step], np.float32)


class Levels(Stamped):
    """Its observation has the level of the episode, and the level that it was told, which holds from the next reset."""

    def __init__(self, lengths=(4,)):
        super().__init__(lengths)
        self._level = self._next = 0.0

    def set_level(self, level):
        self._next = level

    def reset(self, **arguments):
        self._level = self._next
        return super().reset(**arguments)

    def _observation(self):
        return np.array([self._level, self._next, self._step], np.float32)


class FaultyLevels(Faulty):
    """Goes wrong, and its observation's first entry is the level that it was told."""

    level = 0.0

    def set_level(self, level):
        self.level = level

    def _observation(self):
        return np.array([self.level, self._episode, self._step], np.float32)


class FaultyCurriculum(Faulty):
    """Goes wrong, and its observation's first entry is the progress that it was told."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self._progress = -1.0

    def set_progress(self, progress):
        self._progress = progress

    def _observation(self):
        return np.array([self._progress, self._episode, self._step], np.float32)


def same_step_vector(num_envs):
    makers = [lambda of=of: Stamped(of) for of in ((3, 5, 1), (2, 2, 7), (4,))[:num_envs]]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


class Informing(gymnasium.Env):
    """Says in its infos how often it has been stepped."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._count += 1
        info = {"count": self._count, "deep": {"twice": 2.0}}
        info |= {"lock": threading.Lock(), "locks": [threading.Lock()] * 3}  # which cannot be sent
        return np.zeros(1, np.float32), 1.0, self._count == 3, False, info


class Following(Informing):
    """Its observation is the number of steps plus 0 times the action, which is not finite if the action is not."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action):
        self._count += 1
        return (self._count + 0 * action).astype(np.float32), 1.0, False, False, {}


class Serving(Stamped):
    """Starts a program that holds whatever descriptors it is given, and outlives it."""

    def __init__(self):
        super().__init__((5,))
        os.system("sleep 20 &")


class NotClosing(Stamped):
    """Its `close` never comes back, but in the process that `home` names."""

    def __init__(self, home):
        super().__init__((5,))
        self._home = home

    def close(self):
        if os.getpid() != self._home:
            time.sleep(1000)


class Flushing(Stamped):
    """Its reward is 1 where subnormal numbers are taken as 0."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, float(subnormals_are_flushed()), *rest


class Dozing(Stamped):
    """Takes its time for a step."""

    def step(self, action):
        time.sleep(0.05)
        return super().step(action)


class Blind(gymnasium.Env):
    """Images; a reward that is not a number, once for all environments that share the file `once`."""

    observation_space = spaces.Box(0, 255, (84, 84), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, once):
        self._once = once

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((84, 84), np.uint8), {}

    def step(self, action):
        fresh = not os.path.exists(self._once)
        if fresh:
            open(self._once, "w").close()
        return np.full((84, 84), 7, np.uint8), np.nan if fresh else 1.0, False, False, {}


class Remembering(SeeingOffPolicy):
    """Its memory is the number of actions in the episode; `info` repeats it."""

    def initial_state(self, batch_size):
        return torch.zeros(batch_size)

    def rollout_step(self, time_step, state):
        step = super().rollout_step(time_step, state)
        return step._replace(state=state + 1, info={"memory": state})


class RememberingOnPolicy(Remembering):
    on_policy = True
    unroll_use = UnrollUse(handles_stale_policies=True)


class Parting(Stamped):
    """Writes a file when it is closed by another process than `home`."""

    def __init__(self, home, path):
        super().__init__((5,))
        self._home, self._path = home, path

    def close(self):
        if os.getpid() != self._home:
            open(self._path, "w").close()


class Leaving(Stamped):
    """In a worker, leaves things to the end of the process: each adds a line to a file.

    Args:
      home: process id of the trainer.
      path: of the file.
    """

    def __init__(self, home, path):
        super().__init__()
        if os.getpid() == home:
            return
        self._closed = threading.Event()
        self._closing, self._itself = _Remaining(path, "finalizer"), self  # kept by a reference cycle alone
        threading.Thread(target=self._wait, args=(self._closed, path)).start()
        atexit.register(_add_line, path, "exit function")
        inherited = [each for each in weakref.finalize._registry if each.atexit]
        weakref.finalize(Leaving, _add_line, path, "weak reference" if not inherited else str(inherited))
        sys.stdout.write("out")
        Leaving.remains = _Remaining(path)

    def close(self):
        if hasattr(self, "_closed"):
            self._closed.set()

    @staticmethod
    def _wait(closed, path):
        closed.wait()
        _add_line(path, "thread")


class _Remaining:
    """Adds a line to a file when it is deleted."""

    def __init__(self, path, line="clean-up"):
        self._path, self._line = path, line

    def __del__(self):
        _add_line(self._path, self._line)


def _add_line(path, text, open=open):
    with open(path, "a") as file:
        file.write(f"{text}\n")


class Masked(gymnasium.Env):
    """Takes the actions that the mask in its observation allows, two of five, and raises at any other."""

    def __init__(self):
        self.observation_space = spaces.Dict(mask=spaces.MultiBinary(5), step=spaces.Box(0, 100, (1,), np.float32))
        self.action_space = spaces.Discrete(5)
        self._step = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._observation(), {}

    def step(self, action):
        assert self._observation()["mask"][action], f"{action} is forbidden at step {self._step}"
        self._step += 1
        return self._observation(), 0.0, self._step == 7, False, {}

    def _observation(self):
        mask = np.zeros(5, np.int8)
        mask[[self._step % 5, (self._step + 2) % 5]] = 1
        return {"mask": mask, "step": np.full(1, self._step, np.float32)}


class KeepingToMask(RLAlgorithm):
    """Its policy takes the first action that is allowed."""

    on_policy = False

    def __init__(self, *specs):
        super().__init__(*specs)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def rollout_step(self, time_step, state):
        return AlgStep(time_step.observation["mask"].long().argmax(-1), state)

    def random_action(self, time_step):
        return torch.multinomial(time_step.observation["mask"].float(), 1).squeeze(-1)

    def train_step(self, experience, state):
        return AlgStep()

    def calc_loss(self, experience, info):
        return LossInfo(self.weight.sum() + torch.zeros(1, experience.time_step.reward.shape[1]))


class Freezing(Stamped):
    """In a worker, has the trainer signalled and freezes: at its 20th step, or when it is built."""

    def __init__(self, home, at_start):
        super().__init__()
        self._home, self._count = home, 0
        if at_start:
            self._freeze()

    def step(self, action):
        self._count += 1
        if self._count == 20:
            self._freeze()
        return super().step(action)

    def _freeze(self):
        if os.getpid() != self._home:
            os.kill(self._home, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGSTOP)


class Telling(Stamped):
    """In a worker, writes down what kind of process it finds itself in.

    Args:
      home: process id of the trainer.
      path: of the file.
    """

    def __init__(self, home, path):
        super().__init__()
        if os.getpid() == home:
            return
        print("out", flush=True)
        os.write(2, b"err")
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)
        facts = {
            "environment": dict(os.environ),
            "path": sys.path,
            "directory": os.getcwd(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "signals": [str(signal.getsignal(name)) for name in names],
            "wakeup": signal.set_wakeup_fd(-1),
            "descriptors": sorted(os.listdir("/proc/self/fd"), key=int),
            "inheritable": [
                fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)
            ],
            "threads": len(os.listdir("/proc/self/task")),
            "group": os.getpgid(0) == os.getpid(),
            "session": os.getsid(0),
            "parent": os.getppid(),
            "modules": sorted(sys.modules),
            "random": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        }
        with open(path, "w") as file:
            json.dump(facts, file)
