"""`alfish watch`: each checkpoint once, with training's numbers, whatever else happens in the directory."""

import contextlib
import json
import shutil
import threading

import pytest

from alfish.__main__ import main
from alfish.analysis.run_source import RunSeriesSource
from alfish.configuration.opening import open_run
from alfish.runs.checkpoints import Checkpoints
from alfish.training.evaluations import watch as watching
from alfish.training.evaluations.results import Results
from alfish.training.evaluations.watch import Watch

EVALUATION = ["Evaluate.num_episodes=3", "Evaluate.seed=7"]
WITHOUT = "Trainer.listeners=[@CheckpointSaver(), @Summaries()]"


def train(path, *parameters):
    """Trains PPO on Pendulum for 2048 steps in four iterations, with a checkpoint after each."""
    settings = ["Trainer.num_env_steps=2048", "Trainer.unroll_length=32", "CheckpointSaver.period=512", *parameters]
    settings += ["Trainer.max_evaluation_length=40", "CheckpointSaver.keep_last=9", "Trainer.summary_period=512"]
    settings += ["MLP.layers=(8,)", "EpochBatches.num_epochs=1"]
    flags = [f"--gin_param={setting}" for setting in settings]
    assert main(["train", "--gin_file=ppo_pendulum.gin", f"--root_dir={path}", *flags]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that evaluates itself."""
    path = tmp_path_factory.mktemp("runs") / "trained"
    train(path, "Evaluate.period=512", *EVALUATION)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without evaluations."""
    path = tmp_path_factory.mktemp("runs") / "plain"
    train(path, WITHOUT)
    return path


@pytest.fixture
def copy(plain, tmp_path):
    """A copy of it, with its modification times."""
    return shutil.copytree(plain, tmp_path / "run")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(watching, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def evaluate_kept(capsys):
    """Watches a run once; returns the lines."""

    def evaluate_kept(path, *flags, all_kept=True):
        capsys.readouterr()
        arguments = [f"--root_dir={path}", "--idle_seconds=0", *(["--all"] if all_kept else []), *flags]
        assert main(["watch", "--num_episodes=3", "--seed=7", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return evaluate_kept


def steps_of(path):
    return Checkpoints(path / "checkpoints").steps()


def tables(path, name="evaluation"):
    """The tables of episodes, by their steps."""
    found = sorted((path / "eval").glob(f"{name}-*.csv"))
    return {int(table.stem.removeprefix(f"{name}-")): table.read_text() for table in found}


def evaluations(lines):
    return [int(line.split()[1].strip(":").replace(",", "")) for line in lines if ": return " in line]


@pytest.mark.parametrize("num_envs", [1, 8])
def test_training_evaluate_and_watch_give_the_same_numbers(trained, tmp_path, capsys, evaluate_kept, num_envs):
    path, name = shutil.copytree(trained, tmp_path / "run"), f"envs{num_envs}"
    evaluate_kept(path, f"--num_envs={num_envs}", f"--name={name}")
    of_training, of_watch = list(tables(trained).values()), tables(path, name)
    assert list(of_watch.values()) == of_training and len(set(of_training)) == 4
    for steps, table in of_watch.items():
        flags = ["--num_episodes=3", "--seed=7", f"--num_envs={num_envs}", "--json", f"--checkpoint={steps}"]
        assert main(["evaluate", f"--root_dir={path}", *flags]) == 0
        summary = json.loads(capsys.readouterr().out)
        rows = [row.split(",") for row in table.splitlines()[1:]]
        assert [row[2:] for row in rows] == [
            [repr(value), repr(length)] for value, length in zip(summary["returns"], summary["lengths"])
        ]


def test_what_training_has_evaluated_is_left_out(trained, tmp_path, evaluate_kept):
    path = shutil.copytree(trained, tmp_path / "run")
    before = tables(path)
    lines = evaluate_kept(path)
    assert lines == [f"checkpoint {steps:,}: was evaluated by training" for steps in steps_of(path)] + [
        "0 checkpoints evaluated"
    ]
    assert tables(path) == before and not list((path / "eval" / "watch").glob("*-*.json"))


def test_the_runs_own_episodes_are_the_default(trained, tmp_path, capsys):
    path = shutil.copytree(trained, tmp_path / "run")
    assert main(["watch", f"--root_dir={path}", "--all", "--name=own"]) == 0
    assert list(tables(path, "own").values()) == list(tables(trained).values())


def test_watching_again_evaluates_nothing_again(copy, evaluate_kept):
    assert evaluations(evaluate_kept(copy)) == steps_of(copy) == list(tables(copy))
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
    assert evaluate_kept(copy)[-1] == "0 checkpoints evaluated"
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()} == before


def test_without_all_the_newest_comes_first_and_a_restart_skips_none_after_it(copy, evaluate_kept):
    checkpoints, hidden = copy / "checkpoints", copy / "hidden"
    *_, before_last, last = steps_of(copy)
    hidden.mkdir()
    later = checkpoints / f"checkpoint-{last:012d}.pt"
    later.rename(hidden / later.name)
    (copy / "eval" / "watch").mkdir(parents=True)
    Results(copy, "evaluation").first_steps(before_last)  # where a killed process began, which had no result yet
    (hidden / later.name).rename(later)
    assert evaluations(evaluate_kept(copy, all_kept=False)) == [before_last, last]
    assert Results(copy, "evaluation").first_steps(last) == before_last
    assert evaluations(evaluate_kept(copy)) == steps_of(copy)[:-2]


def test_missing_files_after_a_kill_are_written_from_the_saved_result(copy, evaluate_kept):
    evaluate_kept(copy)
    steps = steps_of(copy)
    table, events = copy / f"eval/evaluation-{steps[0]:012d}.csv", copy / "tensorboard/watch"
    content = table.read_text()
    table.unlink()
    (events / f"events.out.tfevents.{steps[1]:012d}.evaluation").unlink()
    unfinished = copy / "eval/watch/.evaluation.tmp"
    unfinished.mkdir()
    (unfinished / "events.out.tfevents.half").write_text("half")
    (copy / "eval/watch/.evaluation-000000009999.json.1.tmp").write_text("{")
    assert evaluations(evaluate_kept(copy)) == []
    assert table.read_text() == content and len(list(events.iterdir())) == len(steps) and not unfinished.exists()


def test_a_different_policy_at_equal_steps_is_evaluated(copy, evaluate_kept):
    evaluate_kept(copy)
    first, second, *_ = steps_of(copy)
    checkpoints = Checkpoints(copy / "checkpoints", keep_last=9)
    state = checkpoints.load(second)[1]
    state["counters"]["env_steps"] = first
    others = [path for steps in steps_of(copy) if (path := checkpoints.path(steps)).exists()]
    saved = {path: path.read_bytes() for path in others}
    checkpoints.save(first, state)  # which supersedes the others
    for path, content in saved.items():
        if path != checkpoints.path(first):
            path.write_bytes(content)
    before = tables(copy)
    assert evaluations(evaluate_kept(copy)) == [first]
    after = tables(copy)
    assert after[first] == before[second] != before[first]


def test_a_broken_checkpoint_is_named_and_the_others_are_evaluated(copy, evaluate_kept):
    first, *others = steps_of(copy)
    path = Checkpoints(copy / "checkpoints").path(first)
    path.write_bytes(path.read_bytes()[:-200])
    lines = evaluate_kept(copy)
    assert evaluations(lines) == others and "is truncated" in lines[0]


def test_removed_checkpoints_are_counted_and_others_evaluated(copy, capsys):
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(open_run(copy))
        watch = stack.enter_context(contextlib.closing(Watch(trainer, "evaluation", 3, 7)))
        first, *others = steps_of(copy)
        load = trainer.load_policy

        def load_after_removal(steps):
            if steps == first:
                trainer.directory.checkpoints.path(first).unlink()
            return load(steps)

        trainer.load_policy = load_after_removal
        watch.run(all_kept=True, idle_seconds=0)
    assert (
        list(tables(copy)) == others
        and watch.words() == "3 checkpoints evaluated, 1 removed before they could be evaluated"
    )


def test_new_checkpoints_are_evaluated_until_the_run_is_done(copy):
    checkpoints = Checkpoints(copy / "checkpoints")
    files = [checkpoints.path(steps) for steps in steps_of(copy)]
    (copy / "done").unlink()
    late = [(path, path.with_suffix(".later")) for path in files[2:]]
    for path, later in late:
        path.rename(later)

    def finish(line):
        if late:
            path, later = late.pop(0)
            later.rename(path)
        else:
            (copy / "done").touch()

    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(open_run(copy))
        watch = stack.enter_context(contextlib.closing(Watch(trainer, "evaluation", 3, 7, show=finish)))
        thread = threading.Timer(60, (copy / "done").touch)  # the test must end
        stack.callback(thread.cancel)
        thread.start()
        watch.run(all_kept=True)
    assert list(tables(copy)) == [int(path.stem.split("-")[1]) for path in files]


def test_watch_follows_a_fallback_to_an_earlier_checkpoint(copy):
    (copy / "done").unlink()
    *_, before_last, last = steps_of(copy)
    path, hidden = Checkpoints(copy / "checkpoints").path(before_last), copy / "hidden"
    path.rename(hidden)

    def fall_back(line):
        if hidden.exists():
            hidden.rename(path)

    with open_run(copy) as trainer, contextlib.closing(Watch(trainer, "evaluation", 3, 7, show=fall_back)) as watch:
        watch.run(idle_seconds=0.3)
    assert list(tables(copy)) == [before_last, last]


def test_an_idle_watch_ends(copy):
    (copy / "done").unlink()
    with open_run(copy) as trainer, contextlib.closing(Watch(trainer, "evaluation", 3, 7)) as watch:
        watch.run(idle_seconds=0.3)
    assert watch.num_evaluated == 1


def test_metrics_csv_may_follow_a_checkpoint(trained, tmp_path, monkeypatch):
    """Training writes the row after the checkpoint, and may be killed between the two."""
    monkeypatch.setattr(watching, "SETTLE_SECONDS", 5.0)
    path = shutil.copytree(trained, tmp_path / "run")
    metrics, content = path / "metrics.csv", (path / "metrics.csv").read_text()
    lines = content.splitlines(keepends=True)
    without_last = "".join(line for line in lines if line.partition(",")[0] != lines[-1].partition(",")[0])
    metrics.write_text(without_last)
    with open_run(path) as trainer, contextlib.closing(Watch(trainer, "evaluation", 3, 7)) as watch:
        threading.Timer(0.5, metrics.write_text, [content]).start()
        watch.run(idle_seconds=0)
        assert watch.num_evaluated == 0
    monkeypatch.setattr(watching, "SETTLE_SECONDS", 0.1)
    metrics.write_text(without_last)
    with open_run(path) as trainer, contextlib.closing(Watch(trainer, "evaluation", 3, 7)) as watch:
        watch.run(idle_seconds=0)
        assert watch.num_evaluated == 1


def test_two_processes_do_not_watch_under_one_name(copy, capsys):
    with open_run(copy) as trainer, contextlib.closing(Watch(trainer, "evaluation", 3, 7)):
        assert main(["watch", f"--root_dir={copy}", "--idle_seconds=0"]) == 2
        assert "is already being watched under the name 'evaluation'" in capsys.readouterr().err
        assert main(["watch", f"--root_dir={copy}", "--idle_seconds=0", "--name=other", "--num_episodes=1"]) == 0


@pytest.mark.parametrize("flag", ["--num_episodes=2", "--seed=8", "--max_length=30"])
def test_one_evaluation_name_means_equal_episodes(copy, trained, tmp_path, capsys, evaluate_kept, flag):
    evaluate_kept(copy)
    for path in (copy, shutil.copytree(trained, tmp_path / "trained")):
        if path != copy and flag == "--max_length=30":
            continue
        capsys.readouterr()
        given = ["watch", f"--root_dir={path}", "--num_episodes=3", "--seed=7", "--idle_seconds=0", flag]
        assert main(given) == 2
        words = capsys.readouterr().err
        assert words.count("\n") == 1 and "--name=evaluation2" in words
        assert main([*given, "--name=evaluation2"]) == 0


def test_another_environment_needs_another_name(copy, capsys, evaluate_kept):
    evaluate_kept(copy)
    config = copy / "config.gin"
    config.write_text(config.read_text() + "\nmake_environment.env_kwargs = {'g': 9.0}\n")
    assert main(["watch", f"--root_dir={copy}", "--num_episodes=3", "--seed=7"]) == 2
    assert "9.0" in capsys.readouterr().err


def test_watch_results_equal_training_results(copy, trained, evaluate_kept, capsys):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    evaluate_kept(copy)
    values, clocks = [], []
    for path in (trained / "tensorboard", copy / "tensorboard" / "watch"):
        events = loader.EventAccumulator(str(path))
        events.Reload()
        tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("evaluation/")]
        values.append({tag: [one.value for one in events.Scalars(tag)] for tag in tags})
        clocks.append([one.step for one in events.Scalars("evaluation/mean_return")])
    # Both runs have the same seed, so they trained the same policies.
    assert values[0] == values[1] and len(values[0]) == 5
    assert clocks == [list(tables(trained)), steps_of(copy)]
    ours, theirs = (RunSeriesSource(path).series("evaluation/mean_return") for path in (copy, trained))
    assert ours.values.tolist() == theirs.values.tolist()
    assert ours.clocks["updates"].tolist() == theirs.clocks["updates"].tolist()
    assert ours.clocks["env_steps"].tolist() == steps_of(copy) and (ours.clocks["wall_seconds"] > 0).all()
    (copy / "metrics.csv").unlink()
    assert RunSeriesSource(copy).series("evaluation/mean_return").values.tolist() == theirs.values.tolist()
    assert RunSeriesSource(copy).series("evaluation/length").values.tolist() == [
        pytest.approx(value) for value in RunSeriesSource(trained).series("evaluation/length").values
    ]


def test_watch_results_do_not_affect_a_continued_run(plain, tmp_path, evaluate_kept):
    states = []
    for name in ("watched", "alone"):
        path = tmp_path / name
        train(path, WITHOUT, "Trainer.stop_at=1024")
        if name == "watched":
            evaluate_kept(path)
        train(path, WITHOUT)
        states.append(Checkpoints(path / "checkpoints").load()[1]["algorithm"])
    assert all((states[0][key] == states[1][key]).all() for key in states[0])


def test_the_runs_own_environment_of_evaluations_is_the_default(tmp_path):
    path = tmp_path / "run"
    own = [
        "Evaluate.environment=@short/make_environment",
        "short/make_environment.env_kwargs={'max_episode_steps': 11}",
    ]
    train(path, "Trainer.num_env_steps=512", "Evaluate.period=0", *EVALUATION, *own)
    (written,) = (path / "eval").glob("evaluation-*.csv")
    expected = written.read_text()
    assert [row.split(",")[3] for row in expected.split()] == ["length", "11", "11", "11"]
    shutil.rmtree(path / "eval")
    assert main(["watch", f"--root_dir={path}", "--all", "--idle_seconds=0"]) == 0
    assert [one.read_text() for one in (path / "eval").glob("*.csv")] == [expected]


def test_films_of_watch_are_in_the_run_and_in_tensorboard(copy, evaluate_kept):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    lines = evaluate_kept(copy, "--video", "--video_episodes=2", all_kept=False)
    [steps] = evaluations(lines)
    rows = [float(row.split(",")[2]) for row in tables(copy)[steps].splitlines()[1:3]]
    [film] = (copy / "films").iterdir()
    assert film.name == f"evaluation-{steps:012d}-episodes-0-1-return-{sum(rows) / 2:.2f}.mp4"
    events = loader.EventAccumulator(str(copy / "tensorboard" / "watch"), {"images": 0})
    events.Reload()
    assert [one.step for one in events.Images("evaluation/film")] == [steps]


def test_invalid_words_are_reported_in_one_sentence(copy, tmp_path, capsys):
    for flags, words in [
        (["--name=a/b"], "--name is 'a/b'"),
        (["--video", "--video_episodes=9", "--num_episodes=3"], "--video_episodes is 9, but there are only 3 episodes"),
        ([f"--root_dir={tmp_path / 'no'}"], "is not a run"),
        (["--root_dir="], "--root_dir is missing"),
    ]:
        assert main(["watch", f"--root_dir={copy}", *flags]) == 2
        found = capsys.readouterr().err
        assert words in found and found.count("\n") == 1, found


def test_the_end_is_looked_for_before_the_last_checkpoint(copy, monkeypatch):
    """Training saves its last checkpoint, then writes `done`: a process that looks in between must look again."""
    (copy / "done").unlink()
    last = Checkpoints(copy / "checkpoints").path(steps_of(copy)[-1])
    last.rename(last.with_suffix(".later"))
    pending = Watch._pending

    def end_of_training(watch):
        """The first time that nothing is pending, the run ends right after the look."""
        found = list(pending(watch))
        if not found and not last.exists():
            last.with_suffix(".later").rename(last)
            (copy / "done").touch()
        return iter(found)

    monkeypatch.setattr(Watch, "_pending", end_of_training)
    with open_run(copy) as trainer, contextlib.closing(Watch(trainer, "evaluation", 3, 7)) as watch:
        watch.run(all_kept=True)
    assert list(tables(copy)) == steps_of(copy)


def test_the_runs_own_lineup_and_name_are_the_default(tmp_path, capsys):
    """The policies of a game against random agents, not against each other."""
    settings = ["include 'ppo.gin'", "import alfish.environments.games", "Trainer.environment = @make_games"]
    settings += ["make_games.game = 'toy_games:Dash'", "make_games.num_games = 2", "Trainer.policies = 'each'"]
    settings += ["Evaluate.lineup = {'right': 'random'}", "Evaluate.name = 'alone'", "Evaluate.num_episodes = 3"]
    settings += ["Evaluate.period = 32", "CheckpointSaver.period = 32", "CheckpointSaver.period_minutes = None"]
    settings += ["Trainer.num_env_steps = 64", "Trainer.unroll_length = 8", "EpochBatches.minibatch_size = 8"]
    settings += ["MLP.layers = (8,)", "Learner.compile = False", "CheckpointSaver.keep_period = 32"]
    (tmp_path / "games.gin").write_text("\n".join(settings))
    run = tmp_path / "run"
    assert main(["train", f"--gin_file={tmp_path / 'games.gin'}", f"--root_dir={run}"]) == 0
    capsys.readouterr()
    before = {path.name: path.read_bytes() for path in (run / "eval").glob("*.csv")}
    assert main(["watch", f"--root_dir={run}", "--all", "--idle_seconds=0", "--allow_import=toy_games"]) == 0
    assert "was evaluated by training" in capsys.readouterr().out
    assert {name for name in before if name.startswith("alone-")}
    assert all((run / "eval" / name).read_bytes() == content for name, content in before.items())
    assert not list((run / "eval").glob("evaluation-*"))
    with open_run(run, allow_import=["toy_games"]) as trainer:
        watch = Watch(trainer, "other", 3, 0, options={"lineup": {"right": "random"}})
        trainer.load_policy("latest")
        assert set(watch._evaluator.evaluate(3).means()) == {"left"}
        watch.close()
