"""Stand-ins for the libraries of simulators, as `alfish.simulators` imports them, on the episodes of `fakes.Clocks`.

Each has the traps of its library: buffers that are written in place, keys that stay, final observations that are lost
or wrong where no episode ended, flags that are numbers, and attributes that wrappers hide.
"""

import dataclasses
import math
import sys
import types
from types import SimpleNamespace
from typing import ClassVar

import gymnasium
import numpy as np
import torch
from fakes import ACTION, OBSERVATION, Clocks
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

TASK = "Fake-Task-v0"
GROUPS = spaces.Dict(policy=OBSERVATION, critic=spaces.Dict(privileged=spaces.Box(-np.inf, np.inf, (1,), np.float32)))


def module(monkeypatch, name, **content):
    """Puts a module into `sys.modules` for a test, and the packages that contain it."""
    made = types.ModuleType(name)
    vars(made).update(content)
    parent, _, last = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            module(monkeypatch, parent)
        setattr(sys.modules[parent], last, made)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class FakeIsaacLab(gymnasium.Env):
    """Isaac Lab's environments: reward, flags and observations are buffers, and keys of `extras` stay."""

    num_alive: ClassVar[int] = 0

    def __init__(self, cfg):
        if FakeIsaacLab.num_alive:
            raise RuntimeError("Simulation context already exists. Cannot create a new one.")
        FakeIsaacLab.num_alive += 1
        self.cfg, self.num_envs, self.device = cfg, cfg.scene.num_envs, cfg.sim.device
        self.single_observation_space, self.single_action_space = GROUPS, ACTION
        self.clocks, self.extras, self.max_episode_length = Clocks(self.num_envs, self.device), {}, 8
        self.common_step_counter = 0
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._policy = torch.zeros(self.num_envs, 3, device=self.device)
        self.reward_buf = torch.zeros(self.num_envs, device=self.device)
        self.terminated, self.truncated = (
            torch.zeros(self.num_envs, dtype=torch.bool, device=self.device) for _ in range(2)
        )

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            torch.manual_seed(seed)
        self.clocks.begin()
        self.extras["log"] = {"Episode_Reward/track": torch.zeros((), device=self.device)}
        return self._observe(), self.extras

    def step(self, action):
        self._advance(action)
        ended = self.terminated | self.truncated
        if ended.any():
            if getattr(self.cfg, "compute_final_obs", False):
                final = self._observe(noise=1.0)
                final["policy"] = torch.where(ended[:, None], final["policy"] - 1, final["policy"])
                self.extras["final_obs"] = final
            self.extras["log"] = {"Episode_Reward/track": self.reward_buf[ended].mean(), "Curriculum/level": 2}
            self.clocks.begin(ended)
        return self._observe(), self.reward_buf, self.terminated, self.truncated, self.extras

    def close(self):
        FakeIsaacLab.num_alive -= 1

    def _advance(self, action):
        self.common_step_counter += 1
        self.episode_length_buf += 1
        for buffer, value in zip((self.reward_buf, self.terminated, self.truncated), self.clocks.advance(action)):
            buffer.copy_(value)

    def _observe(self, noise=None):
        stamp = self.clocks.observation()
        policy = self._policy.copy_(stamp) if noise is None else stamp + noise
        return {"policy": policy, "critic": {"privileged": stamp[:, 2:]}, "debug": stamp}


def install_isaac_lab(monkeypatch, version=3, device="cpu", history=0, **settings):
    """Returns the list of what was launched, with its arguments."""
    launched = []
    term, group = SimpleNamespace(history_length=0), SimpleNamespace(history_length=None, height=None)
    group.height = SimpleNamespace(history_length=history, delay_max_lag=0)
    observations = SimpleNamespace(policy=group, critic=SimpleNamespace(history_length=None, speed=term))

    def parse_env_cfg(task, device=device, num_envs=None):
        assert version == 3 or launched
        cfg = SimpleNamespace(sim=SimpleNamespace(device=device), scene=SimpleNamespace(num_envs=num_envs), seed=None)
        cfg.episode_length_s = 8.0
        vars(cfg).update({"observations": observations, "is_finite_horizon": False, "rewards": {"track": 1.0}})
        vars(cfg).update({"compute_final_obs": False} if version == 3 else {}, **settings)
        return cfg

    class App:
        def __init__(self, *arguments):
            launched.append(arguments)

        def __enter__(self):
            launched.append("entered")

        def __del__(self):
            launched.append("ended the process")

    content = {"launch_simulation": App} if version == 3 else {"AppLauncher": App}
    module(monkeypatch, "isaaclab.app", **content)
    module(monkeypatch, "isaaclab_tasks.utils", parse_env_cfg=parse_env_cfg)
    spec = EnvSpec(TASK, entry_point=lambda cfg: FakeIsaacLab(cfg), disable_env_checker=True)
    monkeypatch.setitem(gymnasium.registry, TASK, spec)
    monkeypatch.setattr(FakeIsaacLab, "num_alive", 0)
    monkeypatch.setattr("alfish.simulators.isaac_lab._LAUNCHED", [])
    return launched


@dataclasses.dataclass
class OwnBox:
    shape: tuple
    dtype: str = "float32"
    low: float = -math.inf
    high: float = math.inf


@dataclasses.dataclass
class OwnDict:
    spaces: dict


class FakeMjlab(FakeIsaacLab):
    """mjlab with `auto_reset` False: a reset of some environments gives new observations of all."""

    def __init__(self, cfg, device):
        assert not cfg.auto_reset
        cfg.sim = SimpleNamespace(device=device)
        super().__init__(cfg)
        self.single_observation_space = OwnDict(
            {"policy": OwnBox((3,)), "critic": OwnDict({"privileged": OwnBox((1,))})}
        )
        self.single_action_space, self._due = OwnBox((1,)), False

    @property
    def unwrapped(self):
        return self

    def reset(self, *, seed=None, env_ids=None, options=None):
        self.extras["log"] = {}
        if env_ids is None:
            return super().reset(seed=seed)
        rows = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        rows[env_ids] = True
        self.extras["log"] = {"Episode_Reward/track": self.reward_buf[rows].mean(), "Curriculum/level": 2}
        self._due = bool(((self.terminated | self.truncated) & ~rows).any())
        self.clocks.begin(rows)
        for buffer in (self.reward_buf, self.terminated, self.truncated):
            buffer.zero_()
        observation = self._observe()
        observation["policy"] = torch.where(rows[:, None], observation["policy"], observation["policy"] + 0.5)
        return observation, self.extras

    def step(self, action):
        if self._due:
            raise RuntimeError("Environments must be reset via reset(env_ids=...) before calling step() again")
        self.extras["log"] = {}
        self._advance(action)
        self._due = bool((self.terminated | self.truncated).any())
        return self._observe(), self.reward_buf, self.terminated, self.truncated, self.extras


def install_mjlab(monkeypatch, has_auto_reset=True):
    cfg = {"scene": SimpleNamespace(num_envs=1), "seed": None, "is_finite_horizon": False}
    cfg |= {"auto_reset": True} if has_auto_reset else {}
    module(monkeypatch, "mjlab.envs", ManagerBasedRlEnv=FakeMjlab)
    registry = {"list_tasks": lambda: [TASK, "Other"], "load_env_cfg": lambda task: SimpleNamespace(**cfg)}
    module(monkeypatch, "mjlab.tasks.registry", **registry)
    monkeypatch.setattr(FakeIsaacLab, "num_alive", 0)


class FakeManiSkill:
    """ManiSkill's vector environment: gymnasium's keys of before 1.0, and a state without clocks."""

    def __init__(self, env, ignore_terminations, record_metrics):
        self._env, self.num_envs, self.device = env.unwrapped, env.unwrapped.num_envs, torch.device("cpu")
        self.single_observation_space, self.single_action_space = OBSERVATION, ACTION
        self.clocks, self.ignore_terminations = Clocks(self.num_envs), ignore_terminations

    def reset(self, *, seed=None, options=None):
        self.clocks.begin()
        return self.clocks.observation(), {}

    def step(self, action):
        reward, terminated, truncated = self.clocks.advance(action)
        if self.ignore_terminations:
            terminated = torch.zeros_like(terminated)
        ended, infos = terminated | truncated, {}
        if ended.any():
            episode = {"return": reward.clone(), "success_once": terminated}
            infos = {"final_observation": self.clocks.observation(), "final_info": {"episode": episode}}
            self.clocks.begin(ended)
        return self.clocks.observation(), reward, terminated, truncated, infos

    def get_state(self):
        raise AssertionError("the state of the physics alone is not the whole state")

    def close(self):
        self.clocks = None


def install_mani_skill(monkeypatch):
    module(monkeypatch, "mani_skill.envs")
    module(monkeypatch, "mani_skill.vector.wrappers.gymnasium", ManiSkillVectorEnv=FakeManiSkill)

    class Base(gymnasium.Env):
        def __init__(self, num_envs, obs_mode="state"):
            self.num_envs, self.obs_mode = num_envs, obs_mode

    monkeypatch.setitem(gymnasium.registry, TASK, EnvSpec(TASK, entry_point=Base, disable_env_checker=True))


class Rows:
    """A mapping like a TensorDict, which iterates over rows."""

    def __init__(self, **parts):
        self._parts = parts

    def keys(self):
        return self._parts.keys()

    def __getitem__(self, key):
        return self._parts[key]

    def __iter__(self):
        raise AssertionError("a TensorDict iterates over rows")


class FakeRslRl:
    """rsl_rl's VecEnv. `kind` is 'plain', 'resets' (in `get_observations`, as Playground) or 'no time_outs'."""

    def __init__(self, num_envs, kind="plain"):
        self.num_envs, self.device, self.num_actions, self.kind = num_envs, "cpu", 1, kind
        self.max_episode_length, self.episode_length_buf = 8, torch.zeros(num_envs, dtype=torch.int64)
        self.clocks, self.extras = Clocks(num_envs), {}
        if kind != "resets":
            self.clocks.begin()

    def get_observations(self):
        if self.kind == "resets":
            self.clocks.episode[:], self.clocks.step[:] = 0, 0
        return self._observe()

    def step(self, action):
        reward, terminated, truncated = self.clocks.advance(action)
        ended = terminated | truncated
        if self.kind != "no time_outs":
            self.extras["time_outs"] = (truncated & ~terminated).float()
        if ended.any():
            self.extras["log"] = {"/level": 2.0}
        self.clocks.begin(ended)
        return self._observe(), reward, ended.long(), self.extras

    def _observe(self):
        stamp = self.clocks.observation()
        return Rows(policy=stamp, critic=Rows(privileged=stamp[:, 2:]))


class FakePuffer:
    """A PufferEnv: numpy buffers that are written in place, and infos now and then."""

    def __init__(self, num_envs):
        self.num_agents, self.clocks = num_envs, Clocks(num_envs)
        self.single_observation_space, self.single_action_space = OBSERVATION, ACTION
        self.observations, self.rewards = np.zeros((num_envs, 3), np.float32), np.zeros(num_envs, np.float32)
        self.terminals, self.truncations = np.zeros(num_envs, bool), np.zeros(num_envs, bool)

    def reset(self, seed=None):
        self.clocks.begin()
        self.observations[:] = self.clocks.observation()
        return self.observations, []

    def step(self, action):
        assert isinstance(action, np.ndarray)
        buffers = self.rewards, self.terminals, self.truncations
        for buffer, value in zip(buffers, self.clocks.advance(torch.from_numpy(action))):
            buffer[:] = value
        ended = torch.from_numpy(self.terminals | self.truncations)
        self.clocks.begin(ended)
        self.observations[:] = self.clocks.observation()
        infos = [{"score": float(score), "note": "text"} for score in self.rewards[ended]]
        return self.observations, *buffers, infos

    def close(self):
        self.clocks = None


class FakeUniLab:
    """UniLab's environment: final observations in a buffer, in a state that a step changes."""

    device = torch.device("cpu")
    obs_groups_spec: ClassVar = {"policy": 3, "critic": 1}
    action_space = ACTION

    def __init__(self, num_envs):
        self.num_envs, self.clocks, self.state, self.step_counter = num_envs, Clocks(num_envs), None, 0
        self._scratch = {"policy": torch.zeros(num_envs, 3), "critic": torch.zeros(num_envs, 1)}

    def init_state(self):
        self.state = SimpleNamespace(obs=None, reward=None, terminated=None, truncated=None, info={})
        self.state.final_observation = None

    def reset(self, env_ids=None, *, seed=None):
        assert self.state is not None and env_ids is None
        self.clocks.begin()
        return self._observe(), {"log": {}}

    def step(self, action):
        self.step_counter += 1
        reward, terminated, truncated = self.clocks.advance(action)
        ended, self.state.final_observation = terminated | truncated, None
        if ended.any():
            for name, value in self._observe().items():
                self._scratch[name].copy_(value)
            self.state.final_observation = self._scratch
            self.clocks.begin(ended)
            self.state.info["log"] = {"level": 2.0}
        vars(self.state).update(obs=self._observe(), reward=reward, terminated=terminated, truncated=truncated)
        return self.state

    def export_training_state(self):
        return {"version": 1, "step_counter": self.step_counter}

    def import_training_state(self, state):
        self.step_counter = state["step_counter"]

    def close(self):
        self.clocks = None

    def _observe(self):
        stamp = self.clocks.observation()
        return {"policy": stamp, "critic": stamp[:, 2:].clone()}


def install_uni_lab(monkeypatch, asked=("mujoco", {"ctrl_dt": 0.02})):
    def make(task, sim_backend, env_cfg_override, num_envs):
        assert (task, sim_backend, env_cfg_override) == (TASK, *asked)
        return FakeUniLab(num_envs)

    content = {"ensure_registries": lambda: None, "list_registered_envs": lambda: {TASK: {}}, "make": make}
    module(monkeypatch, "unilab.base.registry", **content)
