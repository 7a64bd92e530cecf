"""`alfish check-env`: what it says of good and bad environments. Their training is tried by test_first_run.py."""

import textwrap

import gin
import gymnasium
import pytest

from alfish.__main__ import main

pytestmark = pytest.mark.usefixtures("untried_training")


def test_check_env_accepts_a_good_environment(capsys):
    assert main(["check-env", "--env_id=CartPole-v1", "--num_steps=300"]) == 0
    words = capsys.readouterr().out
    assert "observation" in words and "Discrete(2)" in words and "problem" not in words
    able, *refused = [line for line in words.splitlines() if line.startswith(("algorithms", "refused by"))]
    assert able.startswith("algorithms   A2C, APPO, BC, CQL, CrossQ, DQN, ") and ", PPO, " in able
    # One line for all algorithms with the same reason.
    assert refused[0] == (
        "refused by   CalQL, DDPG, REPPO, RecurrentTD3, TD3, TD3BC, TQC: CalQL requires bounded Box actions, but the "
        "action is Discrete(2); train with PPO"
    )


def test_check_env_reports_equal_episodes_of_two_seeds(tmp_path, monkeypatch, capsys):
    (tmp_path / "seeded.py").write_text(
        textwrap.dedent("""
            from alfish.environments.toy import TensorPointMass

            class Deaf(TensorPointMass):
                def reset(self, *, seed=None, options=None):
                    return super().reset(seed=4)

            class InConstructor(TensorPointMass):
                def __init__(self, num_envs, seed):
                    super().__init__(num_envs)
                    self._generator.manual_seed(seed)

                def reset(self, *, seed=None, options=None):
                    return super().reset()
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    same, differ = "two seeds give the same episodes", "two resets with the same seed give different observations"
    assert main(["check-env", "--env_id=seeded:Deaf", "--num_steps=50"]) == 0
    shown = capsys.readouterr().out
    assert f"warning      {same}" in shown and differ not in shown
    assert main(["check-env", "--env_id=seeded:InConstructor", "--num_steps=50"]) == 0
    shown = capsys.readouterr().out
    assert same not in shown and f"warning      {differ}" in shown and "InConstructor does not seed its ep" in shown


def test_check_env_examines_classes_of_tensors(capsys):
    assert main(["check-env", "--env_id=@alfish.environments.toy.TensorPointMass", "--num_steps=250"]) == 0
    assert "problem" not in capsys.readouterr().out


@pytest.mark.parametrize("source", ["info:action_mask", "method:action_masks"])
def test_check_env_takes_only_actions_that_a_mask_allows(capsys, source):
    mask = f"--gin_param=make_environment.action_mask = '{source}'"
    arguments = ["check-env", "--gin_file=ppo_masked.gin", mask, "--num_steps=250"]
    assert main(arguments) == 0
    words = capsys.readouterr().out
    assert "action_mask: ActionMask(80), observation: Discrete(80)" in words and "problem" not in words
    (able,) = [line for line in words.splitlines() if line.startswith("algorithms")]
    assert {"PPO,", "DQN,", "SAC,"} < set(able.split())


BAD = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Bad(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, fault):
        self.fault, self.count = fault, 0

    def reset(self, *, seed=None, options=None):
        if self.fault != "seed":
            super().reset(seed=seed)
        self.count = 0
        return self.np_random.random(2).astype(np.float32), {}

    def step(self, action):
        self.count += 1
        observation = np.full(3 if self.fault == "wide" else 2, 3.0 if self.fault == "outside" else 0.5, np.float32)
        reward = float("nan") if self.fault == "reward" and self.count == 3 else 0.0
        if self.fault == "vector":
            reward = np.array([1.0, 2.0], np.float32)
        if self.fault == "short":
            return observation, reward, False, {}
        return observation, reward, self.count == 5 and self.fault != "endless", False, {}


class Task(Bad):
    def __init__(self, fault="none", low=-1):
        super().__init__(fault)
        self.observation_space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(low, 1, (2, 3), np.float32))

    def reset(self, *, seed=None, options=None):
        return {"a": 1, "b": np.full((2, 3), super().reset(seed=seed)[0][0], np.float32)}, {}

    def step(self, action):
        _, *rest = super().step(action)
        return {"a": 1, "b": np.float32([[0.5, 0.5, 0.5], [0.5, 2.5, 3.5]])}, *rest


for fault in ("none", "vector", "seed", "outside", "reward", "endless", "wide", "short"):
    gymnasium.register(f"Bad-{fault}-v0", Bad, kwargs={"fault": fault})
"""


@pytest.mark.parametrize(
    "fault, word",
    [
        ("seed", "two resets with the same seed give different observations"),
        ("outside", "is outside its space: observation[0] is 3.0, outside [-1.0, 1.0] (and 1 more)"),
        ("reward", "a reward is not finite"),
        ("endless", "no episode ended in 500 random steps"),
        ("wide", "every part of the observation as declared by its space"),
        ("short", "step must return (observation, reward, terminated, truncated, info)"),
    ],
)
def test_check_env_reports_the_faults_of_a_bad_environment(tmp_path, monkeypatch, capsys, fault, word):
    (tmp_path / "bad_envs.py").write_text(BAD)
    monkeypatch.syspath_prepend(tmp_path)
    capsys.readouterr()
    assert main(["check-env", f"--env_id=bad_envs:Bad-{fault}-v0", "--num_steps=50"]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert word in line


def test_check_env_takes_classes_settings_wrappers_and_gin_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad_tasks.py").write_text(BAD.replace("Bad-", "Worse-"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "task.gin").write_text("import bad_tasks\nmake_environment.env_id = 'bad_tasks:Worse-none-v0'\n")

    def checked(*arguments):
        status = main(["check-env", "--num_steps=50", *arguments])
        return status, capsys.readouterr().out

    task = "--env_id=bad_tasks:Task"
    status, words = checked(task)
    assert status == 1 and checked("--env_id=@bad_tasks.Task") == (status, words)
    assert words.endswith("next         fix the problem, and check again\n")
    assert "outside its space: observation.b[1, 1] is 2.5, outside [-1.0, 1.0] (and 1 more)\n" in words
    status, words = checked(task, "--env_kwargs={'low': -5}", "--wrappers=gymnasium.wrappers:FlattenObservation")
    assert status == 1 and words.startswith("observation  Box(") and "[6] is 2.5, outside [-5.0, 1.0]" in words
    assert checked(f"--gin_file={tmp_path / 'task.gin'}")[0] == 0
    assert checked("--gin_param=make_environment.env_id='CartPole-v1'")[0] == 0
    assert gin.config_str() == ""


def test_check_env_refuses_in_one_sentence(refused, tmp_path, monkeypatch):
    (tmp_path / "bad_vectors.py").write_text(BAD.replace("Bad-", "Vector-"))
    monkeypatch.syspath_prepend(tmp_path)
    out = refused("check-env", "--env_id=bad_vectors:Vector-vector-v0", printed=True)
    assert (
        "a reward of the environment has 2 entries, but the environment has no reward_space; declare one, a Box" in out
    )
    for flag, words in [
        ("--env_kwargs=3", "--env_kwargs is '3'; it must be a dict, such as \"{'difficulty': 2}\""),
        ("--env_kwargs={'a':", "it must be a dict"),
        (
            "--wrappers=gymnasium.wrappers:No",
            "--wrappers is 'gymnasium.wrappers:No', but there is no such class; write",
        ),
        ("--wrappers=no_such.thing:A", "--wrappers imports 'no_such.thing', which is not installed"),
        ("--env_id=@bad_vectors:No", "--env_id is 'bad_vectors:No', but there is no such class"),
        ("--env_id=@NotThere", "No configurable matching"),
    ]:
        arguments = [flag] if "env_id" in flag else ["--env_id=CartPole-v1", flag]
        assert words in refused("check-env", *arguments)


def test_check_env_sees_a_time_limit_of_the_environments_own(capsys, monkeypatch):
    """The specification shows none, and episodes are truncated."""
    entry_point = "alfish.environments.toy:MaskedIdentity"
    spec = gymnasium.envs.registration.EnvSpec("OwnLimit-v0", entry_point, kwargs={"length": 20})
    monkeypatch.setitem(gymnasium.registry, "OwnLimit-v0", spec)
    assert main(["check-env", "--env_id=OwnLimit-v0", "--num_steps=100"]) == 0
    assert "time limit" not in capsys.readouterr().out


def test_check_env_notes_that_a_task_has_no_time_limit(capsys):
    assert main(["check-env", "--env_id=Blackjack-v1", "--num_steps=100"]) == 0
    words = (
        "warning      the environment is registered without a time limit, and no episode was truncated: if an episode "
        "may never end, set a"
    )
    assert words in capsys.readouterr().out
    limited = "--env_kwargs={'max_episode_steps': 100}"
    assert main(["check-env", "--env_id=Blackjack-v1", "--num_steps=100", limited]) == 0
    assert "time limit" not in capsys.readouterr().out


def test_check_env_looks_further_for_the_end_of_an_episode(capsys):
    arguments = ["check-env", "--env_id=alfish.environments.toy:MaskedIdentity", "--num_steps=30"]
    assert main([*arguments, "--env_kwargs={'length': 200}"]) == 0
    assert main([*arguments, "--env_kwargs={'length': 400}"]) == 1
    [problem] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert "no episode ended in 300 random steps" in problem and "raise --num_steps to 3000, otherwise" in problem


def test_check_env_suggests_a_run_despite_a_package_problem(tmp_path, monkeypatch, capsys):
    """Its user cannot mend it, and values outside their bounds do training no harm."""
    folder = tmp_path / "site-packages" / "crane_suite"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(BAD.replace("Bad-", "Crane-"))
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert main(["check-env", "--env_id=crane_suite:Task", "--num_steps=50"]) == 1
    words = capsys.readouterr().out
    assert "note         the problem is in the installed package crane_suite: fix it, tell its authors, or" in words
    assert "command      alfish train --gin_file=ppo.gin" in words and "next         fix" not in words
    assert main(["check-env", "--env_id=crane_suite:Crane-endless-v0", "--num_steps=50"]) == 1
    assert capsys.readouterr().out.endswith("next         fix the problem, and check again\n")


def test_check_env_reports_nothing_after_the_faults_are_fixed(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad_envs.py").write_text(BAD)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-env", "--env_id=bad_envs:Bad-none-v0", "--num_steps=50"]) == 0


def test_check_env_refuses_a_misspelt_id(refused):
    words = refused("check-env", "--env_id=CartPol-v1")
    assert "--env_id: there is no environment 'CartPol-v1'; close ones are CartPole-v1, CartPole-v0" in words


def test_check_env_warns_of_results_of_other_types(tmp_path, monkeypatch, capsys):
    (tmp_path / "mistyped.py").write_text(
        textwrap.dedent("""
            import gymnasium
            import numpy as np

            class Mistyped(gymnasium.Env):
                observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
                action_space = gymnasium.spaces.Discrete(2)

                def reset(self, *, seed=None, options=None):
                    super().reset(seed=seed)
                    self.count = 0
                    return np.array([0, 1]), {}

                def step(self, action):
                    self.count += 1
                    return np.array([self.count, 1]), np.array([0.5]), self.count > 5, 0, {}
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    main(["check-env", "--env_id=mistyped:Mistyped", "--num_steps=50"])
    shown = capsys.readouterr().out
    for words in (
        "reset returns the observation as ndarray of dtype int64, but its space has dtype float32",
        "step returns the observation as ndarray of dtype int64, but its space has dtype float32",
        "step returns the reward as ndarray, not as a number",
        "step returns truncated as int, not as bool",
    ):
        assert f"warning      {words}" in shown
