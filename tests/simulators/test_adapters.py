"""Adapters of simulators on stand-ins for their libraries: one stream, no trap, and sentences for wrong settings."""

import functools
import subprocess
import sys
from collections import Counter

import gin
import pytest
import torch
from fake_libraries import (
    TASK,
    FakeIsaacLab,
    FakePuffer,
    FakeRslRl,
    install_isaac_lab,
    install_mani_skill,
    install_mjlab,
    install_uni_lab,
)
from fakes import StampedSimulator, StampedVector, assert_same_streams, columns_of, unroller_of, whole
from far_device import FarDevice
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from alfish.__main__ import main
from alfish.data import StepType
from alfish.environments import SimulatorEnvironment, TensorEnvironment, make_environment
from alfish.errors import UsageError
from alfish.simulators.isaac_lab import IsaacLab
from alfish.simulators.libraries import library, set_up
from alfish.simulators.mani_skill import ManiSkill
from alfish.simulators.mjlab import Mjlab
from alfish.simulators.puffer import Puffer
from alfish.simulators.rsl_rl import RslRl
from alfish.simulators.uni_lab import UniLab

B = 5
# By name: the stand-in, the adapter, and whether it gives final observations.
GIVEN = {
    "isaac_lab 3": (install_isaac_lab, IsaacLab),
    "mjlab": (install_mjlab, Mjlab),
    "mani_skill": (install_mani_skill, ManiSkill),
    "uni_lab": (install_uni_lab, functools.partial(UniLab, engine="mujoco", cfg={"ctrl_dt": 0.02})),
}
LOST = {
    "isaac_lab 2.3": (functools.partial(install_isaac_lab, version=2), IsaacLab),
    "rsl_rl": (None, functools.partial(RslRl, FakeRslRl)),
    "rsl_rl resets": (None, functools.partial(RslRl, functools.partial(FakeRslRl, kind="resets"))),
    "puffer": (None, functools.partial(Puffer, FakePuffer)),
}


def stamp(observation):
    return observation["policy"] if isinstance(observation, dict) else observation


def environment_of(monkeypatch, install, make, **settings):
    if install is not None:
        install(monkeypatch)
        make = functools.partial(make, TASK)
    return make_environment(make, num_envs=B, spread_first_episodes=False, **settings)


@pytest.fixture(scope="module")
def in_next_step():
    return columns_of(TensorEnvironment(StampedVector(B, AutoresetMode.NEXT_STEP), 0), (99,))


@pytest.mark.parametrize("name", GIVEN)
def test_an_adapter_gives_the_episodes_and_advantages_of_next_step(monkeypatch, in_next_step, name):
    environment = environment_of(monkeypatch, *GIVEN[name])
    assert_same_streams(columns_of(environment, stamp=stamp), in_next_step)
    environment.close()


@pytest.mark.parametrize("name", LOST)
def test_an_adapter_that_loses_final_observations_drops_truncations(monkeypatch, name):
    environment = environment_of(monkeypatch, *LOST[name], final_observation="drop")
    found = columns_of(environment, stamp=stamp)
    expected = SimulatorEnvironment(StampedSimulator(B, final="lost"), 0, final_observation="drop")
    assert_same_streams(found, columns_of(expected))
    environment.close()


@pytest.mark.parametrize("name", LOST)
def test_a_lost_final_observation_is_a_sentence(monkeypatch, name):
    unroller = unroller_of(environment_of(monkeypatch, *LOST[name]))
    with pytest.raises(UsageError, match="episodes without returning final observations, .*final_observation = 'drop'"):
        unroller.unroll(9)
    unroller.close()


@pytest.mark.parametrize("name", GIVEN | LOST)
def test_a_loop_without_an_adapter_gives_another_stream(monkeypatch, in_next_step, name):
    """Judges the stand-ins: the observations that a step returns are stored as they are, and taken for final ones."""
    environment = environment_of(monkeypatch, *(GIVEN | LOST)[name], final_observation="drop")

    simulator = environment.simulator
    step = simulator.step
    simulator.step = lambda action: (lambda one: one._replace(final_observation=one.observation))(step(action))
    found = columns_of(environment, stamp=stamp)
    with pytest.raises(AssertionError):
        assert_same_streams(found, in_next_step)
    assert any(row[0] == StepType.LAST for column in found for row in whole(column))
    environment.close()


@pytest.mark.parametrize("name", GIVEN | LOST)
def test_scalars_are_written_once_per_step_with_episode_ends(monkeypatch, name):
    environment = environment_of(monkeypatch, *(GIVEN | LOST)[name], final_observation="drop")
    environment.reset()
    for _ in range(20):
        environment.step(torch.zeros(B, 1))
        ended, _ = environment.take_resets()
        assert bool(environment.infos) == bool(ended.any())
        assert all(float(value) == value for value in environment.infos.values())
    environment.close()


@pytest.mark.parametrize(("name", "waits"), [("isaac_lab 3", 0), ("isaac_lab 2.3", 0), ("mjlab", 1)])
def test_steps_wait_for_the_device_only_to_get_indices(monkeypatch, name, waits):
    install, make = (GIVEN | LOST)[name]
    with FarDevice() as far:
        if name == "mjlab":
            monkeypatch.setattr("alfish.simulators.mjlab.device_named", lambda *_: far.device)
        else:
            install = functools.partial(install, device=far.device)
        environment = environment_of(monkeypatch, install, make, final_observation="drop")
        environment.reset()
        far.clear()
        for _ in range(9):
            environment.step(torch.zeros(B, 1, device=far.device))
            environment.take_resets()
        assert far.where() == Counter({"simulators/mjlab.py: step": 9 * waits} if waits else {})
        environment.close()


class TestIsaacLab:
    def test_2_3_launches_the_simulator_before_it_imports_tasks(self, monkeypatch):
        launched = install_isaac_lab(monkeypatch, version=2)
        IsaacLab(TASK, 2, device="cpu", launcher={"enable_cameras": True}).close()
        assert launched == [({"headless": True, "device": "cpu", "enable_cameras": True},)]

    def test_3_launches_what_the_task_needs_and_leaves_it_open(self, monkeypatch):
        launched = install_isaac_lab(monkeypatch)
        simulator = IsaacLab(TASK, 2, seed=4, cfg={"rewards.track": 2.0, "is_finite_horizon": True})
        cfg = simulator.env.unwrapped.cfg
        assert (cfg.seed, cfg.rewards, cfg.compute_final_obs) == (4, {"track": 2.0}, True)
        simulator.close()
        assert launched == [(cfg, {}), "entered"] and FakeIsaacLab.num_alive == 0

    def test_a_finite_horizon_terminates(self, monkeypatch):
        environment = environment_of(
            monkeypatch, functools.partial(install_isaac_lab, is_finite_horizon=True), IsaacLab
        )
        rows = [row for column in columns_of(environment, stamp=stamp) for row in column]
        assert {row[2] for row in rows if row[0] == StepType.LAST} == {0}
        environment.close()

    @pytest.mark.parametrize(("history", "version", "count"), [(3, 3, 1), (0, 3, 0), (3, 2, 0)])
    def test_final_observations_with_a_history_are_warned_of(self, monkeypatch, history, version, count):
        said = []
        monkeypatch.setattr("absl.logging.warning", lambda words, *arguments: said.append(words % arguments))
        install_isaac_lab(monkeypatch, version=version, history=history)
        IsaacLab(TASK, 2).close()
        assert len(said) == count
        assert all("observations of policy.height without the newest sample" in words for words in said)

    def test_groups_are_chosen(self, monkeypatch):
        install_isaac_lab(monkeypatch)
        environment = make_environment(functools.partial(IsaacLab, TASK, groups=["policy"]), num_envs=2)
        assert list(environment.observation_spec) == list(environment.reset().observation) == ["policy"]
        environment.close()

    @pytest.mark.parametrize("adapter", [IsaacLab, Mjlab])
    def test_a_missing_group_is_named(self, monkeypatch, adapter):
        (install_isaac_lab if adapter is IsaacLab else install_mjlab)(monkeypatch)
        with pytest.raises(UsageError, match=f"{adapter.__name__}.groups has 'image', but .* are (critic, )?policy"):
            adapter(TASK, 2, device="cpu", groups=["policy", "image"])

    def test_a_missing_part_of_the_configuration_is_named(self, monkeypatch):
        install_isaac_lab(monkeypatch)
        for path, words in (
            ("sim.devise", "it has device"),
            ("rewards.trak", "it has track"),
            ("x.y", "does not have$"),
        ):
            with pytest.raises(UsageError, match=f"IsaacLab.cfg sets '{path}', which .*{words}"):
                IsaacLab(TASK, 2, cfg={path: 1})

    def test_a_missing_task_is_refused_with_close_names(self, monkeypatch):
        install_isaac_lab(monkeypatch)
        with pytest.raises(UsageError, match="Isaac Lab has no task 'Fake-Tusk-v0'; did you mean 'Fake-Task-v0'"):
            IsaacLab("Fake-Tusk-v0", 2)

    def test_a_second_one_is_refused_before_it_is_built(self, monkeypatch):
        environment = environment_of(monkeypatch, install_isaac_lab, IsaacLab)
        with pytest.raises(UsageError, match="IsaacLab is used a second time, but a process can hold only one"):
            make_environment(functools.partial(IsaacLab, TASK), num_envs=2, evaluation=True)
        environment.close()

    def test_the_counter_of_the_curriculum_is_saved(self, monkeypatch):
        environment = environment_of(monkeypatch, install_isaac_lab, IsaacLab)
        environment.reset()
        for _ in range(3):
            environment.step(torch.zeros(B, 1))
        state = environment.state_dict()
        environment.close()
        other = environment_of(monkeypatch, install_isaac_lab, IsaacLab)
        assert not other.load_state_dict(state)
        assert other.step(torch.zeros(B, 1)).step_type.tolist() == [StepType.FIRST] * B
        assert other.simulator.env.unwrapped.common_step_counter == 3
        other.close()

    def test_first_episodes_are_spread(self, monkeypatch):
        install_isaac_lab(monkeypatch)
        environment = make_environment(functools.partial(IsaacLab, TASK), num_envs=64)
        environment.reset()
        length = environment.simulator.env.unwrapped.episode_length_buf
        assert length.unique().tolist() == list(range(8))
        environment.close()

    def test_seeding_does_not_repeat_training_random_numbers(self, monkeypatch):
        drawn = []
        for _ in range(2):
            unroller = unroller_of(environment_of(monkeypatch, install_isaac_lab, IsaacLab, seed=3))
            unroller.start()
            drawn.append(torch.rand(()))
            unroller.close()
        assert drawn[0] != drawn[1]

    def test_isaac_sim_does_not_change_the_exit_status(self):
        program = """
import atexit, os, sys, types
sys.modules["omni.kit.app"] = types.ModuleType("omni.kit.app")
atexit.register(os._exit, 0)  # as Isaac Sim does when it is closed
from alfish.__main__ import main
sys.argv = ["alfish", "no_such_command"]
sys.exit(main())
"""
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert found.returncode == 2 and "there is no subcommand" in found.stderr


class TestMjlab:
    def test_observations_of_continuing_environments_come_from_the_step(self, monkeypatch):
        environment = environment_of(monkeypatch, install_mjlab, Mjlab)
        environment.reset()
        for _ in range(20):
            row = environment.step(torch.zeros(B, 1))
            ended, first = environment.take_resets()
            assert torch.equal(first.observation["policy"], first.observation["policy"].round())
            assert torch.equal(row.observation["policy"][~ended], first.observation["policy"][~ended])
        environment.close()

    def test_a_version_that_always_resets_is_refused(self, monkeypatch):
        install_mjlab(monkeypatch, has_auto_reset=False)
        with pytest.raises(UsageError, match="returns no final observations; .*: pip install 'mjlab>=1.6'"):
            Mjlab(TASK, 2)

    def test_mjlab_spaces_become_gymnasium_spaces(self, monkeypatch):
        install_mjlab(monkeypatch)
        simulator = Mjlab(TASK, 2, device="cpu")
        assert isinstance(simulator.observation_space["critic"]["privileged"], spaces.Box)
        assert simulator.action_space.shape == (1,) and not simulator.action_space.is_bounded("both")


class TestManiSkill:
    def test_terminations_may_be_ignored(self, monkeypatch):
        make = functools.partial(ManiSkill, options={"obs_mode": "rgb"}, ignore_terminations=True)
        environment = environment_of(monkeypatch, install_mani_skill, make)
        rows = [row for column in columns_of(environment) for row in column]
        assert {row[2] for row in rows if row[0] == StepType.LAST} == {1}
        assert environment.state_dict() == {}  # the state of the physics alone is not saved


class TestRslRl:
    def test_observations_that_are_not_tensors_are_refused(self):
        def numpy_environment(num_envs):
            env = FakeRslRl(num_envs=num_envs)
            env.get_observations = lambda: torch.zeros(num_envs, 3).numpy()
            return env

        with pytest.raises(UsageError, match="returned an observation of type ndarray; environments of rsl_rl return"):
            RslRl(numpy_environment)

    def test_without_time_outs_every_end_is_a_termination(self):
        make = functools.partial(RslRl, functools.partial(FakeRslRl, kind="no time_outs"))
        rows = [row for column in columns_of(make_environment(make, num_envs=B), stamp=stamp) for row in column]
        assert {row[2] for row in rows if row[0] == StepType.LAST} == {0}

    def test_first_episodes_are_spread(self):
        environment = make_environment(functools.partial(RslRl, FakeRslRl), num_envs=64)
        environment.reset()
        assert environment.simulator._env.episode_length_buf.unique().tolist() == list(range(8))

    def test_a_seed_reaches_the_environment(self):
        seeds = []

        class Seeded(FakeRslRl):
            def seed(self, seed):
                seeds.append(seed)

            def reset(self):
                return self._observe(), {}

        environment = make_environment(functools.partial(RslRl, Seeded), num_envs=2)
        environment.reset()
        environment.reset()
        assert len(seeds) == 1


def test_the_state_of_uni_lab_is_its_counter(monkeypatch):
    environment = environment_of(monkeypatch, *GIVEN["uni_lab"])
    environment.reset()
    environment.step(torch.zeros(B, 1))
    state = environment.state_dict()
    other = environment_of(monkeypatch, *GIVEN["uni_lab"])
    assert not other.load_state_dict(state) and other.simulator._env.step_counter == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (IsaacLab, r"isaaclab is not installed: pip install 'isaaclab\[isaacsim\]'"),
        (Mjlab, "mjlab is not installed: pip install 'mjlab>=1.6'"),
        (ManiSkill, "mani_skill is not installed: pip install mani_skill"),
        (UniLab, "unilab is not installed: pip install unilab"),
    ],
)
def test_a_missing_library_is_named_with_its_command(make, words):
    with pytest.raises(UsageError, match=words):
        make_environment(functools.partial(make, TASK), num_envs=2)


def test_a_library_with_a_missing_dependency_is_reported(monkeypatch, tmp_path):
    (tmp_path / "half.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        library("half", "pip install half")


@pytest.mark.parametrize(("make", "install"), [(IsaacLab, install_isaac_lab), (Mjlab, install_mjlab)])
def test_a_missing_device_is_named(monkeypatch, make, install):
    install(monkeypatch)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UsageError, match=f"{make.__name__}.device is 'cuda:2', but torch finds 2 GPUs here; the last"):
        make(TASK, 2, device="cuda:2")


def test_a_configuration_names_an_adapter(monkeypatch):
    install_isaac_lab(monkeypatch)
    gin.parse_config(
        f"make_environment.env_id = @alfish.simulators.IsaacLab\nIsaacLab.task = '{TASK}'\n"
        "make_environment.num_envs = 3\nmake_environment.action_bounds = 1.0"
    )
    environment = make_environment(device="cpu")
    assert environment.name == "IsaacLab" and environment.num_envs == 3 and environment.action_spec.is_bounded("both")
    environment.close()
    environment = make_environment("alfish.simulators.isaac_lab:IsaacLab", env_kwargs={"task": TASK})
    assert isinstance(environment, SimulatorEnvironment)
    environment.close()


def test_a_setting_replaces_an_attribute_or_a_key():
    class Config:
        depth = 1

        def __init__(self):
            self.parts = {"a": {"b": 1}}

    config = Config()
    set_up(config, {"depth": 2, "parts.a.b": 3}, "X.cfg")
    assert config.depth == 2 and config.parts == {"a": {"b": 3}}


def test_check_env_examines_a_simulator(monkeypatch, capsys, untried_training):
    install_mani_skill(monkeypatch)
    settings = f"--gin_param=ManiSkill.task='{TASK}'", "--env_id=@alfish.simulators.mani_skill.ManiSkill"
    assert main(["check-env", *settings, "--num_steps=20"]) == 0
    said = capsys.readouterr().out
    assert "problem" not in said and ", PPO, " in said
