"""The command line: what it prints, and one clear sentence for each mistake, without a traceback."""

import errno
import functools
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import gin
import gymnasium
import numpy as np
import pytest
import torch
from commands import TINY, run_forked, train
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

import alfish
from alfish.__main__ import SUBCOMMANDS, main, module_of
from alfish.algorithms.ppo import PPO
from alfish.configuration import locating
from alfish.configuration.opening import open_run
from alfish.environments import make_environment
from alfish.environments.sequential import SequentialVectorEnv
from alfish.errors import UsageError
from alfish.training.evaluator import Evaluation
from alfish.training.trainer import Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run."""
    root_dir = tmp_path_factory.mktemp("runs") / "cartpole"
    assert main(train(root_dir, *TINY)) == 0
    return root_dir


def broken(flags):
    raise KeyError("no such joint")


def test_an_error_of_the_users_code_in_a_command_is_reported_in_one_sentence(refused, monkeypatch):
    monkeypatch.setattr("alfish.bin.confs.main", broken)
    words = refused("confs", status=1)
    assert words.startswith(f"alfish confs: broken raised KeyError: 'no such joint' ({__file__}:")


def test_a_size_beyond_memory_is_reported_in_one_sentence(refused, run):
    words = refused("evaluate", f"--root_dir={run}", f"--num_episodes={10**15}", status=1)
    assert words.startswith("alfish evaluate: memory is exhausted: Unable to allocate ") and words.count("\n") == 1


def test_invalid_boolean_flags_are_refused_without_brackets(refused, run):
    words = refused("evaluate", f"--root_dir={run}", "--sample=maybe")
    assert "flag --sample=maybe: Non-boolean argument to boolean flag; `alfish" in words


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["confs"]])
def test_a_closed_pipe_is_not_an_error(arguments):
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "alfish", *arguments], **pipe) as command:
        command.stdout.close()
        words = command.stderr.read()
    assert command.returncode == 0 and words == b""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_environments_cannot_close_a_commands_streams(tmp_path, monkeypatch, untried_training):
    closing = COUNTED.replace("Counted.count += 1", "import sys; sys.stdout.close(); sys.stderr.close()")
    (tmp_path / "my_closing.py").write_text(closing)
    monkeypatch.syspath_prepend(tmp_path)
    status, out, err = run_forked(tmp_path, "check-env", "--env_id=my_closing:Counted", "--num_steps=10")
    assert status == 0 and "Counted" in out, err


def test_a_run_that_failed_before_its_first_checkpoint_may_be_configured_again(refused, run, tmp_path):
    (tmp_path / "config.gin").write_text((run / "config.gin").read_text().replace("PPO.gamma = 0.98", "PPO.gamma = 0"))
    assert main(train(tmp_path, *TINY)) == 0
    assert "PPO.gamma = 0.98" in (tmp_path / "config.gin").read_text()
    words = refused(*train(tmp_path, *TINY, "PPO.gamma=0.5"))  # now there is a checkpoint
    assert "is a run with another configuration" in words and "-PPO.gamma = 0.98\n+PPO.gamma = 0.5\n" in words


# Mistakes in flags.


def test_a_value_without_its_flag_is_shown_with_it(refused, tmp_path):
    assert "flags look like --gin_file=ppo_cartpole.gin" in refused("train", "ppo_cartpole.gin")
    assert "flags look like --env_id=CarRacing-v3" in refused("check-env", "CarRacing-v3")
    assert f"flags look like --root_dir={tmp_path}" in refused("evaluate", tmp_path)
    assert "flags look like --root_dir=runs/ppo" in refused("evaluate", tmp_path / "nowhere")


def test_unknown_subcommands_are_refused_and_the_known_shown(capsys):
    assert main(["trian"]) == 2
    words = capsys.readouterr().err
    assert "there is no subcommand 'trian'; did you mean train?" in words and all(name in words for name in SUBCOMMANDS)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_unknown_flags_are_refused(refused, name):
    words = refused(name, "--no_such_flag=3")
    assert "no_such_flag" in words and f"alfish {name} --help" in words
    takes_words = getattr(importlib.import_module(module_of(name)), "TAKES_WORDS", False)
    assert takes_words or "'stray' is not a flag" in refused(name, "stray")


def test_a_setting_given_as_a_flag_is_refused_with_the_correct_form(refused):
    words = refused("train", "--gin_file=ppo_cartpole.gin", "--learning_rate=1e-3")
    assert "settings of classes are given as in --gin_param=PPO.gamma=0.98" in words


@pytest.mark.parametrize(
    "name, flag",
    [(n, "--root_dir") for n in ("train", "evaluate", "play", "record", "export")] + [("check-env", "--env_id")],
)
def test_a_missing_flag_is_reported(refused, name, flag):
    assert f"{flag} is missing" in refused(name)


def test_a_root_dir_that_cannot_be_made_is_refused(refused, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    words = refused(*train(tmp_path / "file", *TINY))
    assert f"--root_dir={tmp_path / 'file'} cannot be created: it is a file; choose another" in words
    words = refused(*train(tmp_path / "file" / "run", *TINY))
    assert "run cannot be created: Not a directory; choose another directory" in words
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "run")
    assert "dangling cannot be created: File exists; choose another" in refused(*train(tmp_path / "dangling", *TINY))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    assert f"{tmp_path} is not writable; choose another" in refused(*train(tmp_path, *TINY))


def test_a_root_dir_that_no_directory_can_be_is_refused(refused):
    for name, words in (("x" * 300, "File name too long"), ("a\0b", "embedded null")):
        for arguments in (train(name, *TINY), ["evaluate", f"--root_dir={name}"]):
            said = refused(*arguments)
            assert "is not a directory: " in said and words in said and said.count("\n") == 1
        with pytest.raises(UsageError, match=words):
            alfish.train("PPO", "CartPole-v1", root_dir=name, num_iterations=1)


def test_sizes_beyond_memory_are_refused(refused, tmp_path):
    for parameter, words in (
        ("Trainer.unroll_length=1e12", "it must be a number in [0, 10000000]"),
        ("MLP.layers=[10**9]", "each entry an integer in [1, 1000000]"),
    ):
        value = parameter.replace("10**9", "1000000000")
        assert words in refused(*train(tmp_path / "run", *TINY, value))


def test_a_missing_gin_file_flag_is_reported(refused, tmp_path):
    assert "--gin_file is missing: `alfish confs`" in refused("train", f"--root_dir={tmp_path / 'run'}")


@pytest.mark.parametrize(
    "flag", ["--num_episodes=0", "--num_episodes=few", "--seed=-1", f"--seed={2**63}", "--num_envs=0"]
)
def test_a_flags_value_that_makes_no_sense_is_refused(refused, run, flag):
    assert flag.split("=")[0].strip("-") in refused("evaluate", f"--root_dir={run}", flag)


@pytest.mark.parametrize("name", ["evaluate", "play"])
def test_a_directory_that_is_not_a_run_is_refused(refused, run, tmp_path, name):
    words = refused(name, f"--root_dir={tmp_path}")
    assert f"{tmp_path} is not a run" in words and "config.gin" in words
    assert str(run) in refused(name, f"--root_dir={run.parent / 'cartpol'}")  # there are others
    for other in ("awr", "bc", "ppo", "sac"):
        (tmp_path / "runs" / other).mkdir(parents=True)
        (tmp_path / "runs" / other / "config.gin").write_text("")
    assert f"; runs nearby: {tmp_path}/runs/ppo, " in refused(name, f"--root_dir={tmp_path}/runs/pp")
    assert f"{tmp_path}/runs/sac" in refused(name, f"--root_dir={tmp_path}/runs/sacc")
    assert f"; runs nearby: {tmp_path}/runs/" in refused(name, f"--root_dir={tmp_path}/runs")


@pytest.mark.parametrize("name", ["evaluate", "play"])
def test_a_missing_checkpoint_is_refused(refused, run, name):
    [path] = (run / "checkpoints").glob("*.pt")
    step = int(path.stem.partition("-")[2])
    words = refused(name, f"--root_dir={run}", "--checkpoint=7")
    assert "There is no checkpoint at 7 steps" in words and f"[{step}]" in words
    for given in ("newest", "1_", "\u00b2", "-1"):
        words = refused(name, f"--root_dir={run}", f"--checkpoint={given}")
        assert f"--checkpoint is {given!r}; it must be latest, best, or a number" in words


def test_a_run_without_a_checkpoint_is_refused(refused, run, tmp_path):
    (tmp_path / "config.gin").write_text((run / "config.gin").read_text())
    assert "There is no checkpoint in" in refused("evaluate", f"--root_dir={tmp_path}")


def test_environment_errors_are_reported_in_one_sentence_with_the_traceback(tmp_path, monkeypatch, capsys):
    (tmp_path / "breaks.py").write_text(
        textwrap.dedent("""
            import gymnasium
            from toys import OneState

            class Breaks(OneState):
                def step(self, action):
                    raise ZeroDivisionError("the physics exploded")

            gymnasium.register("Breaks-v0", Breaks)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    where = f"({tmp_path / 'breaks.py'}:7, in step)"
    sentence = f"alfish train: breaks:Breaks-v0.step raised ZeroDivisionError: the physics exploded {where}"
    arguments = train(tmp_path / "run", *TINY, "make_environment.env_id='breaks:Breaks-v0'")
    assert main(arguments) == 1
    assert sentence in (shown := capsys.readouterr().err).splitlines() and "Traceback" not in shown
    assert 'raise ZeroDivisionError("the physics exploded")' in (tmp_path / "run" / "log.txt").read_text()
    assert main([*arguments, "--verbosity=1"]) == 1
    assert 'raise ZeroDivisionError("the physics exploded")' in capsys.readouterr().err


def test_a_run_that_failed_exits_with_1(refused, tmp_path, monkeypatch):
    (tmp_path / "spoils.py").write_text(
        textwrap.dedent("""
            import gymnasium
            from toys import OneState

            class Spoils(OneState):
                def step(self, action):
                    observation, _, *rest = super().step(action)
                    return observation, float("nan"), *rest

            gymnasium.register("Spoils-v0", Spoils)
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    arguments = train(
        tmp_path / "run", *TINY, "make_environment.env_id='spoils:Spoils-v0'", "Progress.period_seconds=1e9"
    )
    assert main(arguments) == 1


# Help.


@pytest.mark.parametrize("name", SUBCOMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_examples_and_every_flag(capsys, name, flag):
    assert main([name, flag]) == 0
    words = capsys.readouterr().out
    assert f"alfish {name}" in words and "Flags:" in words
    module = __import__(module_of(name), fromlist=["FLAGS"])
    assert all(f"--{one}: {module.FLAGS[one].help.partition(';')[0]}" in words for one in module.FLAGS)
    assert "repeat this option" not in words


def test_help_of_the_whole_lists_the_subcommands(capsys):
    assert main(["--help"]) == 0
    asked = capsys.readouterr().out
    assert main([]) == 2
    for words in (asked, capsys.readouterr().out):
        assert all(name in words and text in words for name, text in SUBCOMMANDS.items())


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"alfish {alfish.__version__}\n"


def test_a_damaged_evaluation_is_named(refused, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = min((tmp_path / "run" / "eval").glob("*.csv"))
    path.write_text(path.read_text()[:-7])
    words = refused("plot", tmp_path / "run", "--metric=evaluation/length", f"--output={tmp_path / 'x.png'}")
    assert f"{path}, row 2, has " in words and words.endswith("cells instead of 4; fix or move the file\n")


# What they do.


def test_confs_lists_every_file_and_the_number_of_seeds_behind_a_result(capsys):
    assert main(["confs"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split() == ["file", "task", "algorithm", "result", "(seeds)"]
    listed, others = lines[: lines.index("")], " ".join(lines[lines.index("") :])
    texts = {path.name: path.read_text() for path in locating.confs_directory().glob("*.gin")}
    with_task = sorted(name for name, text in texts.items() if "# Task:" in text)
    assert [line.split()[0] for line in listed] == with_task and with_task
    without_task = ", ".join(sorted({*texts} - {*with_task}))
    assert others.strip() == f"Files that these include, or that a second --gin_file names: {without_task}"
    assert max(map(len, lines)) <= 100
    [ppo] = [line for line in listed if line.startswith("ppo_cartpole.gin")]
    assert ppo.split()[1:3] == ["CartPole-v1", "PPO"] and ppo.endswith("500 at 50 k env steps (5)")
    [pong] = [line for line in listed if line.startswith("dqn_pong.gin")]
    assert pong.endswith("12 at 1 M env steps (1)")
    [xqc] = [line for line in listed if line.startswith("xqc_pendulum.gin")]
    assert xqc.split()[2] == "XQC"  # the name in parentheses at the end of the description


def test_confs_lists_those_with_all_words_and_shows_the_text_of_one(refused, capsys):
    assert main(["confs", "HalfCheetah", "student"]) == 0
    path = locating.confs_directory() / "student_halfcheetah.gin"
    command = "alfish train --gin_file=student_halfcheetah.gin --root_dir=runs/student_halfcheetah"
    assert capsys.readouterr().out == f"{path}\n\n{path.read_text()}\n{command}\n"
    assert main(["confs", "hopper"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["file", "ppo_hopper.gin", "sac_hopper.gin", "xqc_hopper.gin"]
    assert main(["confs", "ppo_cartpole"]) == 0  # a name, which appo_cartpole has too
    assert "ppo_cartpole.gin\n\n# Task: " in capsys.readouterr().out
    assert main(["confs", "ppo.gin"]) == 0  # without .gin, a word
    path = locating.confs_directory() / "ppo.gin"
    assert capsys.readouterr().out == f"{path}\n\n{path.read_text()}"
    assert main(["confs", "offline"]) == 0  # a word of no task, so the file
    assert "offline.gin\n\n# Trains on recorded data only" in capsys.readouterr().out
    assert refused("confs", "cartpole", "iql") == (
        "alfish confs: no shipped configuration has cartpole and iql; `alfish confs` lists all of them\n"
    )


def test_train_leaves_a_whole_run_directory(run):
    names = {path.name for path in run.iterdir()}
    assert names == {
        "checkpoints", "tensorboard", "metrics.csv", "eval", "log.txt", "provenance.json", "config.gin",
        "operative_config.gin", "run_id", "done",
    }  # fmt: skip
    assert "PPO.gamma = 0.98" in (run / "config.gin").read_text()
    operative = (run / "operative_config.gin").read_text()
    assert "PPO.value_clip_range = None" in operative and "Trainer.seed = 0" in operative  # defaults are there too


def test_a_run_stopped_by_a_listener_exits_with_0_and_is_finished(tmp_path, capsys):
    parameters = [
        "Trainer.listeners=[@Evaluate(), @StopAt(), @CheckpointSaver()]",
        *("StopAt.return_=1", "Evaluate.period=256", "Evaluate.num_episodes=1", "Trainer.num_env_steps=2000"),
    ]
    assert main(train(tmp_path, *parameters)) == 0
    assert json.loads((tmp_path / "done").read_text())["env_steps"] < 600
    assert "(StopAt.return_ = 1)" in capsys.readouterr().err
    assert main(train(tmp_path, *parameters)) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path} is finished: evaluation/mean_return is ")
    assert line.endswith(f" (StopAt.return_ = 1); remove {tmp_path / 'done'} to continue")
    (tmp_path / "done").unlink()
    limit = "Trainer.wall_seconds=1e-9"
    assert main([*train(tmp_path, *parameters, limit), "--on_config_change=new"]) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(
        "is finished: Trainer.wall_seconds is spent before Trainer.num_env_steps = 2,000; raise wall_seconds to "
        "continue"
    )


def test_a_run_that_time_ends_says_so_at_once(tmp_path, capsys):
    assert main(train(tmp_path, "Trainer.num_env_steps=2000", "Trainer.wall_seconds=1e-6")) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert "is finished: Trainer.wall_seconds is spent before Trainer.num_env_steps = 2,000" in line


def test_evaluate_prints_one_json_object_with_exactly_its_keys(run, capsys):
    capsys.readouterr()
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=5", "--num_envs=2", "--json"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    summary = json.loads(printed)
    assert set(summary) == {
        "env_steps", "num_episodes", "mean", "std", "ci_low", "ci_high", "min", "max", "returns", "lengths",
        "num_cut",
    }  # fmt: skip
    assert (
        summary == Evaluation(summary["env_steps"], 0, tuple(summary["returns"]), tuple(summary["lengths"])).summary()
    )
    assert summary["num_episodes"] == len(summary["returns"]) == len(summary["lengths"]) == 5
    assert summary["returns"] == [float(length) for length in summary["lengths"]]
    assert summary["mean"] == math.fsum(summary["returns"]) / 5
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=5", "--json", "--checkpoint=best"]) == 0
    assert json.loads(capsys.readouterr().out) == summary  # the number of environments does not matter
    step = summary["env_steps"]
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=1", "--json", f"--checkpoint={step}"]) == 0
    assert json.loads(capsys.readouterr().out)["returns"] == summary["returns"][:1]


def test_evaluate_in_python_returns_the_result_of_the_command(run, capsys):
    capsys.readouterr()
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=3", "--seed=7", "--sample", "--json"]) == 0
    found = alfish.evaluate(run, 3, seed=7, sample=True, num_envs=2)
    assert found.summary() == json.loads(capsys.readouterr().out)
    assert alfish.evaluate(str(run), 1, "best", max_length=2).lengths == (2,)
    with pytest.raises(UsageError, match="alfish.evaluate has no argument deterministic; it has .*sample"):
        alfish.evaluate(run, deterministic=True)


def test_another_environment_does_not_get_the_arguments_of_the_runs_own(tmp_path):
    settings = {"make_environment.env_kwargs": {"max_episode_steps": 5}, "MLP.layers": (8,), "Evaluate.num_episodes": 1}
    alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", num_env_steps=100, **settings)
    assert alfish.evaluate(tmp_path / "run", 1).lengths == (5,)
    assert alfish.evaluate(tmp_path / "run", 1, environment="CartPole-v1").lengths > (5,)
    settings = {"make_environment.env_kwargs": {"max_episode_steps": 3}}
    assert alfish.evaluate(tmp_path / "run", 1, environment="CartPole-v1", **settings).lengths == (3,)


def test_a_run_is_evaluated_with_other_settings_than_its_own(run, capsys):
    other = ["--gin_param=make_environment.env_kwargs = {'sutton_barto_reward': True}"]
    capsys.readouterr()
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=2", "--json", *other]) == 0
    assert json.loads(capsys.readouterr().out)["returns"] == [-1, -1]  # this reward is -1 at the end of an episode
    found = alfish.evaluate(run, 2, **{"make_environment.env_kwargs": {"sutton_barto_reward": True}})
    assert found.returns == (-1, -1)
    assert main(["evaluate", f"--root_dir={run}", "--gin_param=Evaluate.num_episodes = 3"]) == 2
    assert "nothing reads Evaluate.num_episodes, bound in --gin_param" in capsys.readouterr().err


def test_a_run_whose_environment_is_a_lambda_is_evaluated_with_a_given_one(tmp_path):
    small = {"make_environment.num_envs": 2, "EpochBatches.num_epochs": 1, "Evaluate.num_episodes": 1}

    def make():
        return gymnasium.make("CartPole-v1", max_episode_steps=4)

    alfish.train("PPO", make, num_env_steps=64, unroll_length=32, root_dir=tmp_path, **small)
    with pytest.raises(UsageError, match="make_environment.env_id is the local .*: give `environment` to alfish.eval"):
        alfish.evaluate(tmp_path, 2)
    assert alfish.evaluate(tmp_path, 2, environment=make).lengths == (4, 4)


def test_a_run_with_objects_as_settings_of_the_learner_is_evaluated(tmp_path):
    rate = {"Learner.learning_rate": lambda progress: 1e-3 * (1 - progress)}
    small = {"make_environment.num_envs": 2, "EpochBatches.num_epochs": 1, "Evaluate.num_episodes": 1}
    alfish.train("PPO", "CartPole-v1", num_env_steps=64, unroll_length=32, root_dir=tmp_path, **small, **rate)
    found = alfish.evaluate(tmp_path, 2)
    assert str(found).startswith("return ") and str(found).endswith(" over 2 episodes")


def test_evaluate_prints_words_otherwise(run, capsys):
    capsys.readouterr()
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=3", "--sample", "--seed=4"]) == 0
    words = capsys.readouterr().out
    assert "3 episodes from seed 4" in words and "95 % interval" in words
    assert not re.search(r"\.0\b", words)  # returns are whole numbers: significant digits only


def test_a_flag_of_one_call_is_forgotten_by_the_next(run, capsys):
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=1", "--json"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "--num_episodes=1"]) == 2
    assert "--root_dir is missing" in capsys.readouterr().err


def test_evaluation_leaves_the_run_as_it_was(run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["evaluate", f"--root_dir={run}", "--num_episodes=1"]) == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A run in an environment without a time limit, in which the mode never reaches an end."""
    path = tmp_path_factory.mktemp("runs") / "endless"
    parameters = ["make_environment.env_id='CliffWalking-v1'", "Trainer.max_evaluation_length=30"]
    assert main(train(path, *parameters, "Trainer.num_env_steps=256", "Evaluate.num_episodes=2")) == 0
    return path


def test_endless_episodes_are_cut_in_all_commands(endless, tmp_path, capsys):
    log = (endless / "log.txt").read_text()
    note = "An episode was cut at {} steps and counts as truncated; more may follow (Trainer.max_evaluation_length)"
    limit = "make_environment.env_kwargs = {'max_episode_steps': 1000}"
    remedy = f"CliffWalking-v1 is registered without a time limit, and {limit} sets one"
    assert log.count(f"{note.format(30)}; {remedy}") == log.count("time limit") == 1
    root_dir = f"--root_dir={endless}"
    before = (endless / "log.txt").read_text()
    assert main(["evaluate", root_dir, "--num_episodes=3", "--json"]) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary["lengths"] == [30] * 3 and summary["num_cut"] == 3 and note.format(30) in printed.err
    assert main(["evaluate", root_dir, "--num_episodes=3", "--max_length=11"]) == 0
    assert "length  mean 11, 3 episodes cut" in capsys.readouterr().out
    assert main(["play", root_dir, "--max_length=7"]) == 0
    assert " in 7 steps" in capsys.readouterr().out
    assert main(["record", root_dir, "--num_episodes=2", "--max_length=5", f"--output={tmp_path / 'data'}"]) == 0
    index = json.loads((tmp_path / "data" / "data_set.json").read_text())
    assert index["num_cut"] == 2 and index["reference_scores"]["num_episodes"] == 2
    assert (endless / "log.txt").read_text() == before


def test_a_film_shows_every_frame_including_the_final_one(run, tmp_path, capsys):
    pytest.importorskip("imageio")
    pytest.importorskip("pygame")
    capsys.readouterr()
    path = tmp_path / "films" / "cartpole.gif"
    assert main(["play", f"--root_dir={run}", f"--video={path}", "--seed=3"]) == 0
    words = capsys.readouterr().out
    [length] = [int(line.split(" in ")[1].split()[0]) for line in words.splitlines() if line.startswith("episode 0")]
    assert f"{path}: {length + 1} frames" in words
    # A GIF holds equal frames once and shows them longer, so its frames are counted by the clock: 20 ms each.
    shown = 0
    with pytest.importorskip("PIL.Image").open(path) as film:
        for i in range(film.n_frames):
            film.seek(i)
            shown += film.info["duration"]
        last = np.asarray(film.convert("RGB"))
    assert shown == 20 * (length + 1)
    # The last one is the true final one: the pole has fallen as it has when the environment ends.
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    observation, _ = env.reset(seed=3)
    policy, ends = alfish.load(run), False
    while not ends:
        observation, _, terminated, truncated, _ = env.step(policy.act(observation))
        ends = terminated or truncated
    np.testing.assert_allclose(last, env.render(), atol=8)  # a GIF has 256 colours


def test_several_films_are_numbered(run, tmp_path):
    pytest.importorskip("imageio")
    pytest.importorskip("pygame")
    assert (
        main(["play", f"--root_dir={run}", f"--video={tmp_path / 'cp.gif'}", "--num_episodes=2", "--max_length=3"]) == 0
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cp-0.gif", "cp-1.gif"]


def test_a_film_has_its_name_when_it_is_whole(refused, run, tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    rendered, render = [], CartPoleEnv.render

    def breaks_in_episode_1(env):
        rendered.append(sorted(path.name for path in tmp_path.iterdir()))
        if rendered.count(["cp-0.mp4"]) and rendered[-1] != ["cp-0.mp4"]:  # the second one is being written
            raise RuntimeError("no context")
        return render(env)

    monkeypatch.setattr(CartPoleEnv, "render", breaks_in_episode_1)
    monkeypatch.setattr(CartPoleEnv, "mujoco_renderer", None, raising=False)
    monkeypatch.setattr("alfish.environments.rendering.follow", lambda env: None)
    video = f"--video={tmp_path / 'cp.mp4'}"
    words = refused("play", f"--root_dir={run}", video, "--num_episodes=3")
    assert "MuJoCo cannot render " in words and "(no context); install EGL or OSMesa" in words
    assert [path.name for path in tmp_path.iterdir()] == ["cp-0.mp4"]
    assert not any("cp-0.mp4" in names for names in rendered[: rendered.index(["cp-0.mp4"])])


@pytest.mark.parametrize(
    "frame",
    [None, "text", np.zeros((16, 16, 3)), np.zeros((1, 1, 3), np.uint8), [np.zeros((16, 16, 3), np.uint8)], "growing"],
    ids=["None", "text", "floats", "tiny", "list", "growing"],
)
def test_frames_that_make_no_film_are_refused(refused, run, tmp_path, monkeypatch, frame):
    pytest.importorskip("imageio")
    sizes, growing = iter(range(16, 1000, 2)), isinstance(frame, str) and frame == "growing"
    monkeypatch.setattr(CartPoleEnv, "render", lambda env: np.zeros((next(sizes), 16), np.uint8) if growing else frame)
    words = refused("play", f"--root_dir={run}", f"--video={tmp_path / 'cp.gif'}")
    assert "the environment renders " in words and ("at least 2 x 2, always of the same size" in words or frame is None)
    assert not list(tmp_path.iterdir())


def test_a_film_that_cannot_be_written_is_refused(refused, run, tmp_path, monkeypatch):
    (tmp_path / "cp-1.gif").mkdir()
    words = refused("play", f"--root_dir={run}", f"--video={tmp_path / 'cp.gif'}", "--num_episodes=2")
    assert f"--video={tmp_path / 'cp-1.gif'} is a directory; give the path of a file" in words
    (tmp_path / "file").touch()
    words = refused("play", f"--root_dir={run}", f"--video={tmp_path / 'file' / 'cp.gif'}")
    assert "cp.gif cannot be written: " in words and words.endswith("; choose another directory\n")

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("imageio.v2.get_writer", full)
    words = refused("play", f"--root_dir={run}", f"--video={tmp_path / 'x.gif'}", status=1)
    assert f"--video={tmp_path / 'x.gif'} cannot be written: [Errno 28] No space left on device" in words


def test_play_prints_the_return_of_each_episode(run, capsys):
    capsys.readouterr()
    assert main(["play", f"--root_dir={run}", "--num_episodes=2", "--seed=8"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("episode 0 (seed 8): return ") and second.startswith("episode 1 (seed 9): return ")


def test_a_film_of_an_unknown_kind_is_refused(refused, run):
    assert "must end in .mp4 or .gif" in refused("play", f"--root_dir={run}", "--video=film.avi")


# Where things are found.


def test_the_device_flag_wins(tmp_path):
    assert main(train(tmp_path / "run", *TINY, "Trainer.device='cuda'", flags=["--device=cpu"])) == 0
    assert "Trainer.device = 'cpu'" in (tmp_path / "run" / "config.gin").read_text()


# From Python.


@gin.configurable(module="tests.command_line")
def configured(number=1, thing=None, other=None):
    return number, thing, other


@gin.configurable(module="tests.command_line")
def inner(x=1):
    return x


def test_load_serves_the_policy_that_evaluate_evaluates(run):
    policy = alfish.load(run)
    action = policy.act(np.zeros(4, np.float32))
    assert action in (0, 1) and policy.env_steps == int(next((run / "checkpoints").glob("*.pt")).stem[11:])
    assert alfish.load(str(run), "best").env_steps == policy.env_steps


SIMULATOR = """
import gymnasium
from gymnasium import spaces


class Simulator(gymnasium.Env):
    observation_space = spaces.Dict(speed=spaces.Box(-9, 9, (2,), "float64"), gear=spaces.Discrete(3, start=1))
    action_space = spaces.Box(-2, 6, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"speed": self.np_random.random(2), "gear": 1}, {}

    def step(self, action):
        return {"speed": self.np_random.random(2), "gear": 3}, float(action[0]), False, True, {}


gymnasium.register("Simulator-v0", Simulator)
"""


COUNTED = """
import gymnasium, numpy
from gymnasium import spaces

class Counted(gymnasium.Env):
    observation_space, action_space, count = spaces.Box(-1, 1, (2,)), spaces.Discrete(2), 0
    def __init__(self, render_mode=None):
        Counted.count += 1
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return numpy.zeros(2, numpy.float32), {}
    def step(self, action):
        return numpy.zeros(2, numpy.float32), 1.0, False, True, {}
"""


@pytest.mark.parametrize("algorithm", ["PPO", "DQN"])
def test_loading_a_run_builds_only_the_needed_environments(tmp_path, monkeypatch, capsys, algorithm):
    (tmp_path / "my_counted.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    settings = {"MLP.layers": (8,), "num_env_steps": 512, "Evaluate.num_episodes": 1, "make_environment.num_envs": 4}
    if algorithm == "PPO":
        settings |= {"EpochBatches.minibatch_size": 64, "EpochBatches.num_epochs": 1, "unroll_length": 32}
    else:
        settings |= {"ReplayBatches.updates_per_env_step": 0.1}
    alfish.train(algorithm, "my_counted:Counted", root_dir=run, **settings)
    config = run / "config.gin"
    many = config.read_text().replace("make_environment.num_envs = 4", "make_environment.num_envs = 1000000")
    assert "1000000" in many
    config.write_text(many)
    counted = sys.modules["my_counted"].Counted
    for command in (["evaluate", "--json"], ["record", f"--output={tmp_path / 'data'}"], ["play"],
                    ["export-policy", f"--output={tmp_path / 'policy.py'}", "--num_steps=5"]):  # fmt: skip
        counted.count = 0
        episodes = [] if command[0] == "export-policy" else ["--num_episodes=3"]
        assert main([*command, f"--root_dir={run}", *episodes]) == 0, capsys.readouterr().err
        assert counted.count <= 10


def test_load_needs_no_environment(tmp_path, monkeypatch):
    with monkeypatch.context() as with_simulator:
        (tmp_path / "my_simulator.py").write_text(SIMULATOR)
        with_simulator.syspath_prepend(tmp_path)
        env_id = "make_environment.env_id='my_simulator:Simulator-v0'"
        assert main(train(tmp_path / "run", *TINY, env_id, "Trainer.transforms=[@ObservationNormalizer]")) == 0
        with open_run(tmp_path / "run") as trainer:
            trainer.load_policy()
            expected = trainer.policy()
    (tmp_path / "my_simulator.py").unlink()
    del sys.modules["my_simulator"], gymnasium.registry["Simulator-v0"]
    policy = alfish.load(tmp_path / "run")
    observation = {"speed": np.array([0.1, 0.9]), "gear": 2}
    action = policy.act(observation)
    assert action == expected.act(observation) and action in policy.action_space
    assert policy.action_space == expected.action_space and policy.observation_space == expected.observation_space


def test_load_of_an_older_run_reads_spaces_from_its_environment(run, tmp_path, monkeypatch):
    monkeypatch.setattr("alfish.configuration.opening.spaces_by_policy", lambda state: {"": None})
    built = []
    monkeypatch.setattr(SequentialVectorEnv, "__init__", noted(SequentialVectorEnv.__init__, built))
    assert alfish.load(run).act(np.zeros(4, np.float32)) in (0, 1) and built
    monkeypatch.undo()
    monkeypatch.setattr(SequentialVectorEnv, "__init__", noted(SequentialVectorEnv.__init__, built := []))
    assert alfish.load(run).act(np.zeros(4, np.float32)) in (0, 1) and not built


def noted(function, calls):
    def noting(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return noting


def test_load_leaves_the_users_gin_configuration_as_it_was(run):
    gin.parse_config(
        "configured.number = 7\nscoped/inner.x = 8\nconfigured.thing = @scoped/inner()\nNINE = 9\n"
        "nine/configured.number = %NINE\n"
    )
    unprintable = math.fsum  # no gin text says this
    gin.bind_parameter("configured.other", unprintable)
    before = gin.config_str()
    assert configured() == (7, 8, unprintable)
    gin.finalize()
    alfish.load(run)
    assert gin.config_is_locked()
    with gin.unlock_config():
        assert gin.config_str() == before
    assert gin.query_parameter("configured.number") == 7
    assert gin.query_parameter("configured.other") is unprintable
    with gin.config_scope("nine"):
        assert configured(thing=1)[0] == 9
    assert gin.operative_config_str().count("PPO") == 0


def test_load_explains_how_to_open_a_run_built_in_python(refused, tmp_path):
    trainer = Trainer(
        tmp_path / "run",
        algorithm=PPO,
        environment=functools.partial(make_environment, "CartPole-v1"),
        num_iterations=1,
        listeners=[],
    )
    trainer.save()
    trainer.close()
    with pytest.raises(UsageError, match="run is a run without config.gin: construct its Trainer in Python"):
        alfish.load(tmp_path / "run")
    assert "call load_policy" in refused("evaluate", f"--root_dir={tmp_path / 'run'}")


def test_load_leaves_the_users_configuration_even_if_it_fails(run, tmp_path):
    gin.bind_parameter("configured.number", 7)
    with pytest.raises(ValueError, match="There is no checkpoint"):
        alfish.load(run, 3)
    assert gin.query_parameter("configured.number") == 7


def test_load_leaves_the_users_random_states_and_threads_as_they_were(run):
    import random

    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(()).item(), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    torch.set_num_threads(2)
    try:
        alfish.load(run)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert (torch.rand(()).item(), np.random.rand(), random.random()) == expected


def test_import_alfish_does_not_import_torch():
    source = Path(alfish.__file__).read_text()
    assert all(hasattr(alfish, name) for name in alfish.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        alfish.nothing  # noqa: B018
    assert "import torch" not in source


def test_commands_work_with_closed_or_full_streams(tmp_path):
    """In processes of their own; none of them imports torch."""
    alfish_command = f"{sys.executable} -m alfish"
    root = Path(alfish.__file__).parent.parent
    script = f"""
        export PYTHONPATH={root}
        {alfish_command} confs > /dev/full; echo confs $?
        {alfish_command} nonsense 2> /dev/full; echo nonsense $?
        {alfish_command} nonsense 2>&-; echo nonsense $?
        {alfish_command} confs >&- 2>&- <&-; echo confs $?
        mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone; {alfish_command} confs; echo gone $?
    """
    found = subprocess.run(["bash", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert found.stdout.split("\n") == ["confs 1", "nonsense 2", "nonsense 2", "confs 0", "gone 1", ""]
    assert found.stderr.splitlines() == [
        "alfish confs: cannot write to standard output: No space left on device",
        "alfish: the working directory has been deleted; change to another one",
    ]


@pytest.fixture
def streams():
    """Standard streams that a test may close and replace."""
    objects, kept = (sys.stdin, sys.stdout, sys.stderr), [os.dup(descriptor) for descriptor in range(3)]
    yield
    sys.stdin, sys.stdout, sys.stderr = objects
    for descriptor, copy in enumerate(kept):
        os.dup2(copy, descriptor)
        os.close(copy)


def test_a_run_trains_without_a_place_to_show_progress(run, tmp_path, monkeypatch, streams):
    """A file that is opened while standard error is closed does not take its place."""
    run = shutil.copytree(run, tmp_path / "run")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 2)
    monkeypatch.setattr(sys, "argv", ["alfish", "train", f"--root_dir={run}", "--gin_param=Trainer.num_env_steps=999"])
    assert main() == 0
    assert json.loads((run / "done").read_text())["env_steps"] >= 999
    os.dup2(full, 1)
    os.close(full)
    os.close(2)
    monkeypatch.setattr(sys, "argv", ["alfish", "evaluate", f"--root_dir={run}", "--num_episodes=1", "--json"])
    assert main() == 1
    assert os.path.samestat(os.fstat(2), os.stat(os.devnull))


def test_a_flag_that_is_nan_is_refused(refused, run, tmp_path):
    for command, flag in (("record", "min_return"), ("watch", "idle_seconds"), ("population", "share")):
        words = refused(
            command,
            f"--root_dir={run}",
            f"--output={tmp_path / 'x'}" * (command == "record") or "--verbosity=0",
            f"--{flag}=nan",
        )
        assert words == f"alfish {command}: --{flag} is nan; it must be a number\n"
    for flag in ("--threshold=nan", "--score_range=nan,1", "--score_range=0,inf"):
        assert "cannot be parsed" in refused("compare", run, flag)


def test_a_sweep_is_refused_before_it_writes_anything(refused, tmp_path):
    flags = ["--gin_file=ppo_cartpole.gin", f"--root_dir={tmp_path / 's'}", "--trials=1"]
    values = "--search=make_environment.env_id=grid('CartPole-v1', 'Nope-v1')"
    assert "there is no environment 'Nope-v1'" in refused("sweep", *flags, values)
    assert not (tmp_path / "s").exists()


def test_a_sweep_without_a_cluster_of_ray_writes_no_file(refused, tmp_path, monkeypatch):
    def fail(*arguments):
        raise UsageError("--ray finds no Ray cluster")

    monkeypatch.setattr("alfish.sweeps.ray_jobs.RayJobs.__init__", fail)
    flags = ["--gin_file=ppo_cartpole.gin", f"--root_dir={tmp_path / 's'}", "--ray"]
    assert "no Ray cluster" in refused("sweep", *flags, "--search=PPO.gamma=grid(0.9, 0.99)")
    assert not (tmp_path / "s").exists()
