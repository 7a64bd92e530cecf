"""docs/several_policies.md: its configurations train on a toy, and its commands run."""

import ast
import json
import re
import textwrap

import numpy as np
import pytest
from test_examples import PROJECT
from toy_games import Tag

import alfish
from alfish.__main__ import main
from alfish.errors import UsageError

pytestmark = pytest.mark.slow

PAGE = (PROJECT / "docs" / "several_policies.md").read_text()
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"^(?:    .+\n|\n)+", PAGE, re.MULTILINE) if block.strip()]
WHOLE = next(block for block in BLOCKS if "include" in block)
ADDITIONS = {
    name: next(block for block in BLOCKS if mark in block and "include" not in block)
    for name, mark in {
        "another algorithm": "PolicySettings.algorithm",
        "an opponent": "against_random",
        "critics": "actor/Encoder",
        "teams": "team_spirit",
        "a league": "Snapshots.period",
    }.items()
}
POPULATION = next(block for block in BLOCKS if "JointPopulation" in block)
FEW = (
    *("make_games.game='toy_games:Tag'", "make_games.num_games=2", "Trainer.num_env_steps=None", "Trainer.seed=3"),
    *(
        "Trainer.num_iterations=3",
        "Trainer.unroll_length=8",
        "EpochBatches.minibatch_size=4",
        "Evaluate.num_episodes=2",
    ),
    *("EpochBatches.num_epochs=1", "MLP.layers=(8,)", "Learner.compile=False", "Trainer.calibration=None"),
)


SMALL = "Evaluate.num_episodes=2", "Learner.compile=False", "MLP.layers=(8,)", "EpochBatches.num_epochs=1"


def train(tmp_path, text, *more):
    conf = tmp_path / "tag.gin"
    conf.write_text(text)
    few = [f"--gin_param={setting}" for setting in (*FEW, *more)]
    assert main(["train", f"--gin_file={conf}", f"--root_dir={tmp_path / 'tag'}", *few]) == 0
    return tmp_path / "tag"


@pytest.mark.parametrize("addition", ADDITIONS)
def test_an_addition_of_the_page_trains(tmp_path, addition):
    more = ["runner/ReplayBatches.warmup_env_steps=8", "ReplayBatches.batch_size=4"] if "algorithm" in addition else ()
    text = WHOLE + ADDITIONS[addition].replace("'agent_0', 'agent_1'", "'agent_0'")
    if "'each'" in text or addition == "a league":  # whose policies have other names
        text = re.sub("^(chaser|runner)/.*", "", text, flags=re.MULTILINE)
    run = train(tmp_path, text, *more)
    names = (run / "metrics.csv").read_text().partition("\n")[0]
    trained = "main" if addition == "a league" else "agent_0" if "'each'" in text else "runner"
    assert f"train/{trained}/loss" in names
    if addition == "an opponent":
        assert list((run / "eval").glob("against_random-*.csv"))


def test_the_population_of_the_page_trains_and_is_continued(tmp_path):
    more = "JointPopulation.period=20", "Trainer.num_iterations=6", "make_games.num_games=4"
    for stop_at in ("Trainer.stop_at=50", "Trainer.stop_at=None"):
        run = train(tmp_path, POPULATION, *more, stop_at)
    rows = [line.split(",") for line in (run / "members.csv").read_text().splitlines()]
    assert rows[0][:4] == ["generation", "member", "parent", "Learner.learning_rate"]
    assert any(parent not in ("", member) and parent[:6] == member[:6] for _, member, parent, *_ in rows[1:])
    assert alfish.load(run, policy="chaser1", allow_import=["toy_games"]).act(np.zeros(4, np.float32)) in (0, 1, 2)


def test_the_python_of_the_page_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "alfish.train" in code)
    code = code.replace('"mpe2.simple_tag_v3", num_games=16', "Tag, num_games=2").replace("400_000", "64, **small")
    small = {"EpochBatches.num_epochs": 1, "EpochBatches.minibatch_size": 16, "Evaluate.num_episodes": 2}
    exec(code, {"Tag": Tag, "small": small})
    policy = alfish.load("runs/tag_python", policy="runner", allow_import=["toy_games"])
    assert policy.algorithm.network.actor_torso.output_size == 128


def test_the_policy_that_alfish_train_returns_is_named_before_training(tmp_path):
    conf = tmp_path / "tag.gin"
    conf.write_text(WHOLE)
    few = dict(setting.split("=", 1) for setting in FEW)
    settings = {name: ast.literal_eval(value) for name, value in few.items()}
    root_dir = tmp_path / "run"
    with pytest.raises(UsageError, match="has the policies chaser, runner; name one"):
        alfish.train(conf=str(conf), root_dir=root_dir, **settings)
    assert not list(root_dir.rglob("*.pt")), "it was trained before the error"
    policy = alfish.train(conf=str(conf), root_dir=root_dir, policy="runner", **settings)
    assert policy.act(np.zeros(4, np.float32)) in (0, 1, 2) and policy.env_steps > 0


def test_the_commands_of_the_page_run(tmp_path, capsys):
    run = train(tmp_path, WHOLE)
    assert alfish.load(run, policy="runner").act(np.zeros(4, np.float32)) in (0, 1, 2)
    commands = [line.strip() for line in PAGE.splitlines() if line.startswith("    alfish ") and "runs/tag" in line]
    tried = []
    for command in commands:
        name, *flags = command.replace("'", "").replace("runs/tag", str(run)).split()[1:]
        if name == "train" or "--video" in command:
            continue
        flags = [flag.replace("runner.py", str(tmp_path / "runner.py")) for flag in flags]
        flags += ["--json"] if name == "evaluate" else ["--num_steps=20"]
        capsys.readouterr()
        assert main([name, *flags, "--allow_import=toy_games"]) == 0
        tried.append(name)
        if name == "evaluate":
            found = json.loads(capsys.readouterr().out)
            assert found["by_objective"]["chaser"] == [(15 + 6) / 2] * 20  # the reward of step t is t + 1
    assert tried == ["evaluate", "evaluate", "export-policy"] and (tmp_path / "runner.npz").is_file()


def test_the_example_trains_two_players_in_turns(tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    few = ["Trainer.num_env_steps=600", "make_games.num_games=4", *SMALL]
    command = ["train", "--gin_file=examples/tictactoe.gin", f"--root_dir={tmp_path / 'run'}"]
    assert main([*command, *(f"--gin_param={one}" for one in few)]) == 0
    names = {path.name.partition("-")[0] for path in (tmp_path / "run" / "eval").glob("*.csv")}
    assert names == {"evaluation", "first_against_random", "second_against_random"}


def test_the_league_of_the_examples_trains_and_is_rated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(PROJECT)
    few = ["Trainer.num_env_steps=600", "make_games.num_games=4", *SMALL]
    few += ["Snapshots.period=200", "CheckpointSaver.period=300", "Evaluate.period=300"]
    run = tmp_path / "run"
    command = ["train", "--gin_file=examples/league.gin", f"--root_dir={run}"]
    assert main([*command, *(f"--gin_param={one}" for one in few)]) == 0
    log = (run / "log.txt").read_text()
    assert [f"past{k} is now main of" in log for k in range(4)] == [True, True, True, False]
    evaluations = [path.name.partition("-")[0] for path in (run / "eval").glob("*.csv")]
    assert len(evaluations) == 2 and set(evaluations) == {"evaluation"}
    flags = ["--checkpoints=all", "--num_games=2", f"--output={tmp_path / 'cross.csv'}"]
    assert main(["crossplay", f"--root_dir={run}", *flags]) == 0
    assert "exploitability" in capsys.readouterr().out and (tmp_path / "cross-players.csv").is_file()
