"""Populations: who is replaced by whom, that members are runs like any other, and that a kill changes nothing."""

import contextlib
import csv
import dataclasses
import json
import os
import random
from pathlib import Path

import gin
import numpy as np
import pytest
import torch

from alfish.__main__ import main
from alfish.configuration import reading
from alfish.errors import RunError, UsageError
from alfish.runs.checkpoints import Checkpoints
from alfish.runs.stop_signals import StopSignals
from alfish.sweeps.jobs import JobEnded
from alfish.sweeps.population import BEST, CSV, MEMBER, Population, PopulationSpecification, result_of
from alfish.sweeps.run_state import FAILED, RunState
from alfish.training.generations import Member, MemberResult

RATE = "Learner.learning_rate"
SPECIFICATION = PopulationSpecification(
    perturb={"a.x": "0.001..10", "a.n": "1..64"},
    seed=3,
    members=8,
    generations=6,
    steps=100,
    share=0.25,
    gap=0.0,
    last=1,
)
NOT_GIVEN = dict.fromkeys(("members", "generations", "steps", "share", "gap", "last")) | {"perturb": []}


# Results.


def test_a_value_is_the_mean_of_the_last_evaluations():
    state = RunState(Path(), False, None, 300, {100: (1.0, 3.0), 200: (2.0, 6.0), 300: (5.0, 7.0)})
    member = Member(0, 0, None, {})
    assert result_of(member, state, 1) == MemberResult(member, 6.0, 1.0)
    assert result_of(member, state, 2) == MemberResult(member, 5.0, (1.0 + 4.0) / 4)
    assert result_of(member, state._replace(failure="why"), 1).has_failed
    assert result_of(member, state._replace(evaluations={300: (np.nan, 1.0)}), 1).has_failed
    assert result_of(member, state._replace(evaluations={300: (1.0,)}), 1).variance == np.inf


# Runs that cost nothing.


class Killed(BaseException):
    pass


class Runs:
    """Jobs whose runs write what a run writes: their value depends on all settings of their ancestors.

    Args:
      generator: of kills, which raise Killed; None: nobody is killed.
      fails: name of a member that fails.
    """

    size = 3

    def __init__(self, generator=None, fails=None):
        self._generator, self._fails, self.running, self.arguments = generator, fails, [], {}

    def start(self, directory, arguments):
        self.running.append(directory)
        self.arguments[directory] = arguments
        self._maybe_kill()

    def _maybe_kill(self):
        if self._generator is not None and self._generator.random() < 0.1:
            raise Killed

    def wait(self, timeout):
        self._maybe_kill()
        directory = self.running.pop(0)
        if f"{directory.parent.name}/{directory.name}" == self._fails:
            return [JobEnded(directory, 1)]
        if self._generator is not None and self._generator.random() < 0.2:
            return [JobEnded(directory, -9)]
        settings = dict(one.removeprefix("--gin_param=").split("=", 1) for one in self.arguments[directory][1:-1])
        stop_at, parent = int(settings["Trainer.stop_at"]), Checkpoints(directory / "checkpoints")
        score = json.loads(parent.path(parent.steps()[-1]).read_text()) if parent.steps() else 0.0
        score += float(settings["a.x"]) + 0.1 * float(settings["a.n"])
        (directory / "eval").mkdir(exist_ok=True)
        for k in range(4):
            text = f"episode,return\n0,{score + 0.25 * k}\n1,{score}\n"
            (directory / "eval" / f"evaluation-{stop_at - 25 * (3 - k):012d}.csv").write_text(text)
        (directory / "checkpoints").mkdir(exist_ok=True)
        temporary = directory / "temporary"
        temporary.write_text(json.dumps(score))
        self._maybe_kill()
        os.replace(temporary, parent.path(stop_at + 7))
        (directory / "replay").mkdir(exist_ok=True)
        Checkpoints(directory / "replay").path(stop_at + 7).write_text(f"rows of {score}")
        return [JobEnded(directory, 0)]


def run(directory, jobs, specification=SPECIFICATION, signals=None):
    lines = []
    Population(directory, specification, jobs, signals or StopSignals(lambda: None), lines.append).run()
    return lines


def content(directory):
    """Text of each file that must not depend on kills."""
    files = [*directory.glob(f"g*/m*/{MEMBER}"), *directory.glob("g*/m*/*/*"), directory / CSV]
    return {str(path.relative_to(directory)): path.read_text() for path in files}


def test_generations_continue_from_linked_parent_files(tmp_path):
    jobs = Runs()
    run(tmp_path, jobs)
    assert len(list(tmp_path.glob("g*/m*/" + MEMBER))) == 48
    copies = 0
    for path in tmp_path.glob("g*/m*/" + MEMBER):
        generation, member = int(path.parent.parent.name[1:]), int(path.parent.name[1:])
        noted, arguments = json.loads(path.read_text()), jobs.arguments[path.parent]
        assert arguments[0] == f"--gin_file={tmp_path}/base/config.gin" and arguments[-1] == "--on_config_change=new"
        settings = {
            **noted["bindings"],
            "Trainer.seed": str(3 + member),
            "Trainer.stop_at": str(100 * generation + 100),
        }
        assert arguments[1:-1] == [f"--gin_param={name}={value}" for name, value in settings.items()]
        if generation == 0:
            assert noted["parent"] is None
            continue
        parent = tmp_path / noted["parent"]
        assert parent.parent.name == f"g{generation - 1:03d}"
        copies += parent.name != path.parent.name
        for kind in ("checkpoints", "replay"):
            name = f"checkpoint-{100 * generation + 7:012d}.pt"
            assert (path.parent / kind / name).samefile(parent / kind / name)
    assert copies == 2 * 5
    rows = list(csv.DictReader((tmp_path / CSV).read_text().splitlines()))
    last = {row["member"]: float(row["value"]) for row in rows if row["generation"] == "5"}
    assert os.readlink(tmp_path / BEST) == f"g005/m{max(last, key=last.get)}"
    assert max(last.values()) > 2 * max(float(row["value"]) for row in rows if row["generation"] == "1")


@pytest.mark.parametrize("share, gap", [(0.5, 1.0), (0.0, 0.0)])
def test_kills_at_any_moment_change_nothing(tmp_path, share, gap):
    specification = dataclasses.replace(SPECIFICATION, share=share, gap=gap, generations=3)
    run(tmp_path / "whole", Runs(), specification)
    generator, kills = random.Random(0), 0
    while True:
        try:
            run(tmp_path / "killed", Runs(generator), specification)
            break
        except Killed:
            kills += 1
    assert kills > 5
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert os.readlink(tmp_path / "killed" / BEST) == os.readlink(tmp_path / "whole" / BEST)


def test_a_member_that_was_half_created_is_completed(tmp_path):
    """What a killed command has left is completed, not taken for a run of new parameters."""
    four = dataclasses.replace(SPECIFICATION, generations=4)
    run(tmp_path / "whole", Runs(), four)
    run(tmp_path / "cut", Runs(), dataclasses.replace(SPECIFICATION, generations=3))
    begun = tmp_path / "cut" / "g003"
    for number, kinds in enumerate([(), ("replay",), ("replay", "checkpoints")]):
        parent = json.loads((tmp_path / "whole" / f"g003/m{number}" / MEMBER).read_text())["parent"]
        for kind in kinds:
            (begun / f"m{number}" / kind).mkdir(parents=True)
            name = f"checkpoint-{307:012d}.pt"
            os.link(tmp_path / "cut" / parent / kind / name, begun / f"m{number}" / kind / name)
    run(tmp_path / "cut", Runs(), four)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_a_kill_while_files_are_linked_changes_nothing(tmp_path, monkeypatch):
    specification = dataclasses.replace(SPECIFICATION, generations=3)
    run(tmp_path / "whole", Runs(), specification)
    link, calls = os.link, []

    def kills(*arguments):
        calls.append(arguments)
        if len(calls) % 5 == 0:
            raise Killed
        link(*arguments)

    monkeypatch.setattr(os, "link", kills)
    while not (tmp_path / "killed" / CSV).exists() or "2,7" not in (tmp_path / "killed" / CSV).read_text():
        with contextlib.suppress(Killed):
            run(tmp_path / "killed", Runs(), specification)
    assert len(calls) > 2 * 16 and content(tmp_path / "killed") == content(tmp_path / "whole")


def test_files_are_copied_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", link)
    two = dataclasses.replace(SPECIFICATION, generations=2)
    run(tmp_path / "copied", Runs(), two)
    monkeypatch.undo()
    run(tmp_path / "linked", Runs(), two)
    assert content(tmp_path / "copied") == content(tmp_path / "linked")


def test_failed_members_are_replaced_unless_all_failed(tmp_path):
    lines = run(tmp_path / "one", Runs(fails="g001/m0"), dataclasses.replace(SPECIFICATION, generations=3))
    assert "g001/m0 failed: exit status 1" in lines and (tmp_path / "one/g001/m0" / FAILED).exists()
    noted = json.loads((tmp_path / "one" / "g002/m0" / MEMBER).read_text())
    assert noted["parent"] != "g001/m0"
    single = dataclasses.replace(SPECIFICATION, members=1, share=0.0)
    with pytest.raises(RunError, match="all members of generation 1 have failed; the first failure: exit status 1"):
        run(tmp_path / "all", Runs(fails="g001/m0"), single)


def test_a_population_ends_with_the_generation_that_spends_the_budget(tmp_path):
    class Spends(Runs):
        def wait(self, timeout):
            (ended,) = super().wait(timeout)
            if ended.directory.parent.name == "g002":
                (ended.directory / "done").write_text("{}")
            return [ended]

    lines = run(tmp_path, Spends())
    assert "Generation 2 is the last one, because g002/m0 has finished: its budget is spent, or" in lines[-1]
    assert os.readlink(tmp_path / BEST).startswith("g002/") and not (tmp_path / "g003").exists()


def test_a_member_whose_last_evaluation_a_signal_prevented_is_continued(tmp_path):
    """Its checkpoint is that of the pause; the same command makes up for the evaluation."""

    class Cut(Runs):
        def wait(self, timeout):
            ended = super().wait(timeout)
            if len(self.arguments) == 2 and not self.cut:
                self.cut = ended[0].directory
                (self.cut / "eval" / "evaluation-000000000100.csv").unlink()
                return [JobEnded(self.cut, 143)]
            return ended

    jobs = Cut()
    jobs.size, jobs.cut = 1, None
    two = dataclasses.replace(SPECIFICATION, generations=2)
    lines = run(tmp_path / "cut", jobs, two)
    assert "g000/m1 was stopped with status 143 and is continued" in lines
    run(tmp_path / "whole", Runs(), two)
    continued = json.loads((tmp_path / "cut/g001/m1" / MEMBER).read_text())
    assert continued == json.loads((tmp_path / "whole/g001/m1" / MEMBER).read_text())
    assert (tmp_path / "cut/g000/m1/eval/evaluation-000000000100.csv").exists()


def test_a_signal_ends_a_population_before_anything_more_is_started(tmp_path):
    signals = StopSignals(lambda: None)

    class Signalled(Runs):
        def wait(self, timeout):
            signals.number = 15
            return super().wait(timeout)

    jobs = Signalled()
    two = dataclasses.replace(SPECIFICATION, generations=2)
    run(tmp_path, jobs, two, signals)
    assert len(jobs.arguments) == 3 and not (tmp_path / CSV).exists()
    run(tmp_path, Runs(), two)
    run(tmp_path / "whole", Runs(), two)
    assert (tmp_path / CSV).read_text() == (tmp_path / "whole" / CSV).read_text()


# The specification.


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "--perturb is missing"),
        ({"perturb": ["PPO.gamma"]}, "is not NAME=LOW..HIGH"),
        ({"perturb": ["PPO.gamma=0.9"]}, "is not NAME=LOW..HIGH"),
        ({"perturb": ["PPO.gamma=low..high"]}, "is not NAME=LOW..HIGH"),
        ({"perturb": ["PPO.gamma=0.99..0.9"]}, "the range is upside down; write 0.9..0.99"),
        ({"perturb": ["PPO.gamma=0.9..0.9"]}, "the range is empty"),
        ({"perturb": ["PPO.gamma=0.9..1e999"]}, "bounds must be finite"),
        ({"perturb": ["PPO.entropy_coef=-1..1"]}, "LOW is at least 0"),
        ({"perturb": ["Trainer.seed=1..9"]}, "the population itself needs Trainer.seed"),
        ({"perturb": ["Trainer.num_env_steps=1..9"]}, "the population itself needs Trainer.num_env_steps"),
        ({"perturb": ["PPO.gamma=0.9..0.95", "PPO.gamma=0.9..0.99"]}, "--perturb has PPO.gamma 2 times"),
        ({"perturb": ["PPO.gama=0.9..0.95"]}, "did you mean gamma?"),
        ({"perturb": ["PPO.gamma=0.9..1.5"]}, "PPO.gamma is 1.5"),
        ({"perturb": ["Linear.start=0.9..1.5"]}, "nothing reads Linear.start"),
        ({"perturb": ["PPO.reward_weights[1]=0.1..1"]}, "weights of rewards are saved with a policy"),
        ({"perturb": ["Learner.learning_rate['all']=0.1..1"]}, "has no such entry: the value is 0.0003"),
        ({"perturb": ["PPO.gamma=0.9..0.95"], "steps": 700, "generations": 2}, "does not end with an evaluation"),
        (
            {"perturb": ["PPO.gamma=0.9..0.95"], "steps": 1500, "generations": 3},
            "of 1,500 steps are more",
        ),
        ({"perturb": ["PPO.gamma=0.9..0.95"], "members": 3, "generations": 4}, "0.25 of 3 members is less than one"),
    ],
)
def test_mistakes_are_reported_in_one_sentence_before_anything_starts(toy, tmp_path, given, words):
    with pytest.raises(UsageError) as raised:
        PopulationSpecification.open(tmp_path / "new", [str(toy)], [], NOT_GIVEN | given)
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "new").exists()


def test_another_users_directory_executes_no_code(toy, tmp_path):
    given = NOT_GIVEN | {"perturb": ["PPO.gamma=0.9..0.95"], "generations": 2}
    PopulationSpecification.open(tmp_path / "p", [str(toy)], [], given)
    copy, specification = tmp_path / "p" / "base" / "config.gin", tmp_path / "p" / "population.json"
    before = copy.read_text()
    copy.write_text(f"import wave\n{before}")
    with pytest.raises(UsageError, match="wave"):
        PopulationSpecification.open(tmp_path / "p", [], [], NOT_GIVEN)
    PopulationSpecification.open(tmp_path / "p", [], [], NOT_GIVEN, ["wave"])
    copy.write_text(before)
    text = specification.read_text()
    specification.write_text(text.replace("0.9..0.95", "0.9\\nimport wave\\nPPO.gamma = 0.9..0.95"))
    with pytest.raises(UsageError, match="is not NAME=LOW..HIGH"):
        PopulationSpecification.open(tmp_path / "p", [], [], NOT_GIVEN)


@pytest.mark.parametrize(
    "content",
    [
        '{"parent": null, "bindings": {"a.x": "1\\nimport wave", "a.n": "1"}}',
        '{"parent": null, "bindings": {"a.x": "1"}}',
        '{"parent": "g000/m1", "bindings": {"a.x": "1", "a.n": "1"}}',
        '{"parent": null, "bindings": {"a.x": 1, "a.n": "1"}}',
        '{"parent": null, "bindings": null}',
        '{"name": "m"}',
        "[]",
        "",
    ],
)
def test_a_description_that_alfish_did_not_write_is_refused(tmp_path, content):
    (tmp_path / "g000" / "m0").mkdir(parents=True)
    (tmp_path / "g000" / "m0" / MEMBER).write_text(content)
    with pytest.raises(UsageError, match="member.json (is not|does not|describes)"):
        run(tmp_path, Runs())


def test_generations_must_fit_iterations_and_budget(toy, tmp_path):
    given = NOT_GIVEN | {"perturb": ["PPO.gamma=0.9..0.95"], "generations": 20}
    for bindings, words in [
        (["Evaluate.period=100"], "an iteration has 128 steps, but a generation only 100"),
        (["Evaluate.period=0"], "Evaluate.period is 0"),
        (
            ["Trainer.num_env_steps=None", "Trainer.num_iterations=9"],
            "--steps is missing: the budget is",
        ),
    ]:
        with pytest.raises(UsageError, match=words):
            PopulationSpecification.open(tmp_path / "new", [str(toy)], bindings, given)


def test_an_entry_of_a_dict_is_perturbed(toy, tmp_path):
    name = "Learner.learning_rate['all']"
    given = NOT_GIVEN | {"perturb": [f"{name}=1e-5..1e-2"]}
    bound = ["Learner.learning_rate={'all': 1e-3}", "Evaluate.period=200"]
    specification = PopulationSpecification.open(tmp_path / "p", [str(toy)], bound, given)
    assert [one.name for one in specification.parameters] == [name]
    with reading.preserved():
        reading.read([str(tmp_path / "p/base/config.gin")], [f"{name}=0.0005"])
        assert gin.query_parameter("Learner.learning_rate") == {"all": 0.0005}
    given = NOT_GIVEN | {"perturb": ["Learner.learning_rate['all']=1e-5..inf"]}
    with pytest.raises(UsageError, match="is not NAME=LOW..HIGH"):
        PopulationSpecification.open(tmp_path / "q", [str(toy)], bound, given)


def test_a_changed_population_specification_is_refused(toy, tmp_path):
    given = NOT_GIVEN | {"perturb": ["PPO.gamma=0.9..0.95"], "generations": 2, "steps": 500}
    first = PopulationSpecification.open(tmp_path / "p", [str(toy)], ["Trainer.seed=4"], given)
    assert (first.seed, first.members, first.share) == (4, 8, 0.25)
    assert PopulationSpecification.open(tmp_path / "p", [], [], NOT_GIVEN) == first
    more = PopulationSpecification.open(tmp_path / "p", [], [], NOT_GIVEN | {"generations": 4})
    assert (more.generations, more.steps) == (4, 500)
    before = (tmp_path / "p" / "population.json").read_bytes()
    for bindings, changed, words in [
        (["Trainer.seed=4"], {"share": 0.5}, "-share = 0.25\n+share = 0.5"),
        (["Trainer.seed=4"], {"perturb": ["PPO.gamma=0.9..0.96"]}, "+perturb = {'PPO.gamma': '0.9..0.96'}"),
        (["Trainer.seed=5"], {}, "-Trainer.seed = 4\n+Trainer.seed = 5"),
        (["Trainer.seed=4", "PPO.lambda_=0.8"], {}, "+PPO.lambda_ = 0.8"),
    ]:
        with pytest.raises(UsageError) as raised:
            PopulationSpecification.open(tmp_path / "p", [str(toy)], bindings, NOT_GIVEN | changed)
        assert "another specification (- then, + now)" in str(raised.value) and words in str(raised.value)
    with pytest.raises(UsageError, match="--gin_param needs --gin_file"):
        PopulationSpecification.open(tmp_path / "p", [], ["PPO.lambda_=0.8"], NOT_GIVEN)
    assert (tmp_path / "p" / "population.json").read_bytes() == before


def test_the_command_names_missing_flags_and_refuses_other_directories(toy, tmp_path, capsys):
    perturb = "--perturb=PPO.gamma=0.9..0.95"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run_id").write_text("1\n")
    for arguments, words in [
        ([], "--root_dir is missing"),
        ([f"--root_dir={tmp_path}/x", perturb], "--gin_file is missing"),
        ([f"--root_dir={tmp_path}/run", perturb, f"--gin_file={toy}"], "is a run; choose another --root_dir"),
        ([f"--root_dir={tmp_path}/x", perturb, f"--gin_file={toy}", "--share=0.7"], "is not a number in the range"),
    ]:
        assert main(["population", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    assert not (tmp_path / "x").exists()


# Real runs, in this process.


class Here:
    """Jobs that train in this process, one after another."""

    size = 1

    def __init__(self):
        self.running, self._ended = [], []

    def start(self, directory, arguments):
        self.running.append(directory)
        self._ended.append(JobEnded(directory, main(["train", f"--root_dir={directory}", *arguments])))

    def wait(self, timeout):
        self.running.clear()
        ended, self._ended = self._ended, []
        return ended


def train(toy, directory, bindings=(), **given):
    """Trains a population, and returns its specification."""
    specification = PopulationSpecification.open(directory, [str(toy)], list(bindings), NOT_GIVEN | given)
    run(directory, Here(), specification)
    return specification


SHORT = "Trainer.num_env_steps=1000", "EpochBatches.num_epochs=1", "Evaluate.num_episodes=2"


def weights(directory):
    """Parameters in the newest checkpoint of a run."""
    _, state = Checkpoints(directory / "checkpoints").load("latest")
    return torch.cat([value.flatten().double() for value in state["algorithm"].values()])


@pytest.mark.slow
def test_without_replacement_members_are_runs_that_were_stopped_and_continued(toy, tmp_path):
    """And here, where the environment can be continued exactly, runs that never stopped."""
    perturb = [f"{RATE}=1e-4..1e-1", "PPO.entropy_coef=0.001..0.1"]
    train(toy, tmp_path / "p", perturb=perturb, members=2, generations=2, share=0.0)
    for number in range(2):
        noted = json.loads((tmp_path / "p" / f"g001/m{number}" / MEMBER).read_text())
        assert noted["parent"] == f"g000/m{number}"
        bindings = [f"--gin_param={name}={value}" for name, value in noted["bindings"].items()]
        arguments = [f"--gin_file={toy}", f"--gin_param=Trainer.seed={number}", *bindings]
        for name, stops in (("stopped", ["1000", "2000"]), ("whole", ["None"])):
            for stop_at in stops:
                directory = tmp_path / f"{name}{number}"
                stop = f"--gin_param=Trainer.stop_at={stop_at}"
                assert main(["train", f"--root_dir={directory}", *arguments, stop]) == 0
            assert torch.equal(weights(tmp_path / "p" / f"g001/m{number}"), weights(directory))
        assert (tmp_path / "p" / f"g001/m{number}" / "done").is_file()
        assert not (tmp_path / "p" / f"g000/m{number}" / "done").exists()


@pytest.mark.parametrize(
    "parameter, bounds",
    [
        (RATE, "1e-4..1e-1"),
        ("optimizers.Adam.weight_decay", "0.001..10"),
    ],
)
def test_perturbations_apply_after_loading_the_parent_checkpoint(toy, tmp_path, parameter, bounds):
    """The copy continues with the weights of its parent, and as a run with the new value from there on does."""
    train(toy, tmp_path / "p", SHORT, perturb=[f"{parameter}={bounds}"], members=2, generations=2, share=0.5)
    (copy,) = [
        number
        for number in range(2)
        if json.loads((tmp_path / "p" / f"g001/m{number}" / MEMBER).read_text())["parent"] != f"g000/m{number}"
    ]
    parent, own = 1 - copy, tmp_path / "p" / "g001" / f"m{1 - copy}"
    old, new = (
        json.loads((tmp_path / "p" / f"g001/m{n}" / MEMBER).read_text())["bindings"][parameter] for n in (parent, copy)
    )
    assert old != new
    assert not torch.equal(weights(own), weights(tmp_path / "p" / f"g001/m{copy}"))
    text = (tmp_path / "p" / f"g001/m{copy}" / "operative_config.gin").read_text()
    assert f"\n{parameter.rpartition('.')[0].rpartition('.')[2]}.{parameter.rpartition('.')[2]} = {new}\n" in text


def test_a_member_whose_training_diverges_is_replaced(toy, tmp_path, capsys):
    train(toy, tmp_path / "p", SHORT[:1], perturb=[f"{RATE}=1e-40..1e36"], members=4, generations=2, share=0.25)
    failed = [path.parent.name for path in (tmp_path / "p" / "g000").glob(f"*/{FAILED}")]
    assert failed
    for name in failed:
        noted = json.loads((tmp_path / "p" / "g001" / name / MEMBER).read_text())
        assert noted["parent"] and noted["parent"].partition("/")[2] not in failed
