"""What `alfish check-env` warns of, and the first run that it suggests."""

import itertools
import shlex
import types

import gin
import numpy as np
import pytest
from gymnasium import spaces

import alfish
from alfish.__main__ import main
from alfish.bin import first_run
from alfish.training.trainer import Trainer

HARD = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Hard(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
    reward, length = 0.0, 5

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observed(), {}

    def step(self, action):
        self.count += 1
        return self.observed(), self.reward, self.count >= self.length, False, {}

    def observed(self):
        return np.array([self.np_random.normal(), 1.7e9 + 0.02 * self.count, 3.0, 0.0])


class Far(Hard):
    action_space = spaces.Box(0, np.inf, (2,), np.float32)
    reward, length = 5000.0, 1

    def observed(self):
        return np.array([1500.0, 1.0, 1.0, 1.0]) * self.np_random.random()


class Uneven(Far):
    reward = 0.001

    def observed(self):
        return np.array([50.0, 1.0, 1.0, 0.01]) * self.np_random.random()


class Picture(Hard):
    observation_space = spaces.Box(0, 255, (40, 40, 3), np.float32)
    action_space = spaces.Discrete(2)
    reward = 1.0

    def observed(self):
        return (255 * self.np_random.random((40, 40, 3))).astype(np.float32)


gymnasium.register("LongHard-v0", Hard, max_episode_steps=100_000)
"""


@pytest.fixture
def hard(tmp_path, monkeypatch, capsys, untried_training):
    """Returns a function that checks an environment of the module."""
    (tmp_path / "hard_envs.py").write_text(HARD)
    monkeypatch.syspath_prepend(tmp_path)

    def checked(name, *arguments):
        capsys.readouterr()
        assert main(["check-env", f"--env_id={name}", "--num_steps=100", *arguments]) == 0
        return capsys.readouterr().out

    return checked


@pytest.mark.parametrize(
    "name, words",
    [
        ("Hard", "observation: 2 of its 4 entries, first [2], never changed"),
        (
            "Hard",
            "observation[1] is about 1.7e+09 and changes by at most 0.08 per step, a change that is lost in float32",
        ),
        ("Hard", "every reward was 0 in 200 random steps"),
        ("Hard", "actions reach 1e+06"),
        ("LongHard-v0", "the time limit is 100,000 steps"),
        (
            "Far",
            "observation reaches 1.5e+03, but networks learn best from numbers near 1; list @ObservationRescaler",
        ),
        (
            "Far",
            "rewards have mean 5000 and standard deviation 0, but networks learn values near 1 best; list "
            "@RewardRescaler",
        ),
        ("Far", "an action has no upper bound"),
        ("Far", "every episode ended after one step"),
        ("Uneven", "observation has entries of sizes from 0.01 to 50; list @ObservationRescaler"),
        ("Uneven", "rewards have mean 0.001"),
        (
            "Picture",
            "observation is an image of floats up to 255, but only uint8 images are divided by 255; make it uint8",
        ),
    ],
)
def test_check_env_warns_of_what_makes_learning_hard(hard, name, words):
    assert any(line.startswith(f"warning      {words}") for line in hard(f"hard_envs:{name}").splitlines())


def test_check_env_has_no_warning_for_tasks_that_are_learned_with_usual_settings(hard):
    for env_id in ("CartPole-v1", "Acrobot-v1", "MountainCarContinuous-v0"):
        assert "warning" not in hard(env_id, "--num_steps=1000")


def test_check_env_suggests_a_first_run_that_trains(hard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrapper = "gymnasium.wrappers:FlattenObservation"
    out = hard("hard_envs:Uneven", f"--wrappers={wrapper}", "--gin_param=Trainer.seed = 3")
    said = {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in reversed(out.splitlines())}
    choice = "Begin with ppo.gin: it takes the least time and tuning"
    assert said["next"] == f"base configurations that fit: PPO (ppo.gin). {choice}"
    assert said["time"] == (
        "training makes about 200 steps/s on this machine, tried for 2 s: about 8 minutes for 100,000 steps, a first "
        "budget; raise it if the return is still rising at the end"
    )
    command = shlex.split(said["command"].replace("=100000", "=256"))
    assert command[:2] == ["alfish", "train"] and main([*command[1:], "--gin_param=EpochBatches.num_epochs=1"]) == 0
    assert (tmp_path / "runs" / "ppo_uneven" / "done").is_file()
    python = (
        said["Python"].replace("100_000", "256, **{'EpochBatches.num_epochs': 1}").replace("runs/ppo", "runs/python")
    )
    eval(python, {"alfish": alfish})
    saved = [tmp_path / "runs" / name / "config.gin" for name in ("ppo_uneven", "python_uneven")]
    assert saved[0].read_text() == saved[1].read_text() and wrapper in saved[0].read_text()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's compiler, at import
@pytest.mark.usefixtures("interpreted")
def test_check_env_suggests_a_compiled_unroller_for_environments_in_tensors(hard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = hard("alfish/CartPole-v1", "--gin_param=Trainer.seed = 3")
    said = {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in reversed(out.splitlines())}
    assert "PPO (ppo_tensor.gin), PPO (ppo.gin), SAC" in said["next"]
    assert said["next"].endswith("Begin with ppo_tensor.gin: it compiles steps, policy and updates")
    settings = {"CompiledUnroller.compile": False, "Learner.compile": False, "EpochBatches.num_epochs": 1}
    short = [f"--gin_param={name}={value}" for name, value in settings.items()]
    assert main([*shlex.split(said["command"].replace("=500000", "=256"))[1:], *short]) == 0
    assert (tmp_path / "runs" / "ppo_tensor_cartpole_v1" / "done").is_file()
    python = said["Python"].replace("500_000", f"256, **{settings}").replace("runs/ppo", "runs/python")
    eval(python, {"alfish": alfish})
    saved = [tmp_path / "runs" / f"{word}_tensor_cartpole_v1" / "config.gin" for word in ("ppo", "python")]
    assert saved[0].read_text() == saved[1].read_text() and "CompiledUnroller" in saved[0].read_text()


def test_check_env_suggests_an_algorithm_by_action_space_and_speed(hard, monkeypatch):
    out = hard("Pendulum-v1", "--num_steps=200")
    assert (
        "Begin with ppo.gin: it takes the least time and tuning" in out and "about 8 minutes for 100,000 steps" in out
    )
    assert (
        "or           SAC (sac.gin): at most about 2 minutes for 20,000 steps; it needs the fewest steps where actions "
        "are continuous" in out
    )
    assert out.splitlines()[-1] == (
        "command      alfish train --gin_file=sac.gin --gin_param=\"make_environment.env_id='Pendulum-v1'\" "
        "--gin_param=Trainer.num_env_steps=20000 --root_dir=runs/sac_pendulum_v1"
    )
    assert "Begin with ppo.gin: it keeps no images" in hard("hard_envs:Picture")
    assert "1,000,000 steps" in hard("hard_envs:Picture")
    assert "or    " not in hard("hard_envs:Picture")
    out = hard("CartPole-v1")
    assert (
        "Begin with ppo.gin: it takes the least time" in out
        and "or           DQN (dqn.gin): at most about 4 minutes" in out
    )
    monkeypatch.setattr("alfish.bin.observed.Observed.steps_per_second", 20.0)
    out = hard("CartPole-v1")
    assert (
        "Begin with dqn.gin: it learns from each step many times, and steps of this environment are slow" in out
        and "about 20 steps/s on this machine, at most, because the environment is slow: about 42 min" in out
    )
    out = hard("Pendulum-v1", "--num_steps=200")
    assert "Begin with sac.gin" in out and "or           PPO (ppo.gin): about 83 minutes for 100,000 steps" in out


def test_check_env_repeats_the_gin_file_that_has_an_algorithm(hard, monkeypatch):
    out = hard("CartPole-v1", "--gin_file=dqn_cartpole.gin")
    assert (
        "command      alfish train --gin_file=dqn_cartpole.gin --gin_param=\"make_environment.env_id='CartPole-v1'\""
        in out
    )


def test_check_env_suggests_the_conf_with_the_preprocessing_for_atari_games(untried_training):
    binding = "make_environment.env_id = 'ALE/Pong-v5'"
    image = spaces.Box(0, 255, (210, 160, 3), np.uint8)
    game = types.SimpleNamespace(name="ALE/Pong-v5", observation_spec=image, action_spec=spaces.Discrete(6))
    lines = dict(first_run.suggestions(first_run.Task([], [binding]), game, ["PPO"], 900.0, in_tensors=False))
    flag = "--gin_param=\"make_environment.env_id='ALE/Pong-v5'\""
    assert lines["command"] == f"alfish train --gin_file=ppo_atari.gin {flag} --root_dir=runs/ppo_pong_v5"
    assert lines["time"] == "training makes about 200 steps/s on this machine, tried for 2 s"
    bindings = [binding, "make_environment.wrappers = ['gymnasium.wrappers:GrayscaleObservation']"]
    lines = dict(first_run.suggestions(first_run.Task([], bindings), game, ["PPO"], 900.0, in_tensors=False))
    assert lines["command"].startswith("alfish train --gin_file=ppo.gin ")


def test_check_env_suggests_hindsight_for_goals(untried_training):
    goals = {name: spaces.Box(-1, 1, (2,)) for name in ("achieved_goal", "desired_goal", "observation")}
    parts = {"name": "Reach-v0", "observation_spec": goals, "action_spec": spaces.Box(-1, 1, (2,))}
    parts["observation_space"], parts["action_space"] = spaces.Dict(goals), parts["action_spec"]
    task = first_run.Task([], ["make_environment.env_id = 'Reach-v0'"])

    def lines(method):
        game = types.SimpleNamespace(**parts, method=lambda name: method if name == "compute_reward" else None)
        return dict(first_run.suggestions(task, game, ["PPO", "SAC"], 900.0, in_tensors=False))

    assert "--gin_param='ReplayBatches.hindsight = @HindsightReplay' lets SAC" in lines(max)["goals"]
    assert "Begin with sac.gin: its replay can relabel goals" in lines(max)["next"]
    assert "goals" not in lines(None) and "Begin with ppo.gin" in lines(None)["next"]


def test_the_speed_of_training_is_measured_with_updates_and_without_files(tmp_path, monkeypatch, capsys):
    updates = []

    def closed(trainer, plain=Trainer.close):
        updates.append(trainer.clock.updates)
        plain(trainer)

    # A clock that advances with the iterations: on a busy machine, the time would be over before the first update.
    calls, iterations = itertools.count(), {"PPO": 3, "DQN": 30, "SAC": 75, "TD3": 75}
    monkeypatch.setattr(first_run, "time", types.SimpleNamespace(perf_counter=lambda: next(calls) / 100))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Trainer, "close", closed)
    for name, base in first_run.BASES.items():
        env_id = "Pendulum-v1" if name in ("SAC", "TD3") else "CartPole-v1"
        monkeypatch.setattr(first_run, "MEASURED_SECONDS", iterations[name] / 100)
        bindings = [f"make_environment.env_id = '{env_id}'", "Learner.compile = False"]  # which takes seconds
        bindings += [
            "Trainer.extra_listeners = [@StopAt()]",
            "StopAt.return_ = 475",
        ]  # for evaluations, which are left out
        bindings += (
            ["MLP.layers = (8,)", "EpochBatches.num_epochs = 1"] if name == "PPO" else ["ReplayBatches.batch_size = 8"]
        )
        bindings += ["CriticEnsemble.layers = (8,)"] if name in ("SAC", "TD3") else []
        assert first_run.training_speed(first_run.Task([], bindings), base) > 1
    assert len(updates) == 4 and min(updates) > 8
    assert not any(tmp_path.iterdir()) and gin.config_str() == ""
    assert capsys.readouterr() == ("", "")
