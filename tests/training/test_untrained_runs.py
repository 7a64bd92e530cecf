"""Runs that end without an update: refused before they start where that is known, else one sentence and status 1."""

import functools

import pytest
import toy_confs
from resuming import run_killed_after_a_save

import alfish
from alfish.__main__ import main
from alfish.algorithms.ppo import PPO
from alfish.environments import make_environment
from alfish.errors import RunError, UsageError
from alfish.learner.batches import EpochBatches
from alfish.runs.checkpoints import Checkpoints
from alfish.training.listener import Listener
from alfish.training.listeners import CheckpointSaver, Evaluate
from alfish.training.trainer import Trainer

FEW = ["Trainer.num_env_steps=400", "Evaluate.num_episodes=1", "MLP.layers=(8,)", "ReplayBatches.batch_size=8"]


@pytest.fixture
def train(tmp_path, capsys):
    """Trains DQN in `tmp_path / 'run'`; returns the exit status and what is printed on stderr."""

    def train(*parameters):
        files = [f"--gin_file={one}" for one in ["dqn_cartpole.gin", *parameters] if one.endswith(".gin")]
        given = [f"--gin_param={one}" for one in (*FEW, *parameters) if not one.endswith(".gin")]
        capsys.readouterr()
        status = main(["train", *files, f"--root_dir={tmp_path / 'run'}", *given])
        return status, capsys.readouterr().err

    return train


def test_a_run_that_times_out_in_warm_up_always_exits_with_1(train, tmp_path):
    for _ in range(2):
        status, said = train("ReplayBatches.warmup_env_steps=300", "Trainer.wall_seconds=1e-6")
        line = said.strip().splitlines()[-1]
        assert status == 1 and line.startswith(f"alfish train: {tmp_path / 'run'} finished after ")
        assert "without an update, so its policy is untrained: the run spent Trainer.wall_seconds; raise it" in line
        assert "or lower ReplayBatches.warmup_env_steps, now 300" in line
    assert (tmp_path / "run" / "done").exists() and Checkpoints(tmp_path / "run" / "checkpoints").steps()


def test_a_run_that_ends_before_replay_holds_a_batch_names_the_settings_of_the_batch(train):
    few = ("ReplayBatches.warmup_env_steps=1", "ReplayBatches.batch_size=350", "Trainer.wall_seconds=1e-6")
    status, said = train(*few)
    words = "or lower ReplayBatches.batch_size, window_length, burn_in or state_period: the first update waits for 350"
    assert status == 1 and words in said


def test_a_run_stopped_by_a_listener_in_warm_up_always_exits_with_1(train, tmp_path, monkeypatch):
    (tmp_path / "stopper.py").write_text(
        "import gin\nfrom alfish.training.listener import Listener\n\n\n@gin.configurable\nclass Stopper(Listener):\n"
        "    def after_iteration(self, run, report):\n        run.stop('solved')\n"
    )
    (tmp_path / "stopping.gin").write_text("import stopper\nTrainer.extra_listeners = [@Stopper()]\n")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        status, said = train("ReplayBatches.warmup_env_steps=300", "stopping.gin")
        assert status == 1 and "the run stopped (solved); remove run/done to continue" in said


@pytest.mark.parametrize(
    "budget", [["Trainer.num_env_steps=400"], ["Trainer.num_env_steps=None", "Trainer.num_iterations=9"]]
)
def test_a_budget_without_updates_exits_with_2_and_writes_nothing(train, tmp_path, budget):
    status, said = train("ReplayBatches.warmup_env_steps=400", *budget)
    assert status == 2 and said.count("\n") == 1
    assert "which ends the run before its first update, so nothing would be trained; raise the budget, or" in said
    assert not (tmp_path / "run" / "config.gin").exists()


def test_alfish_train_raises_the_same(tmp_path):
    options = {"MLP.layers": (8,), "ReplayBatches.batch_size": 8, "ReplayBatches.warmup_env_steps": 400}
    with pytest.raises(UsageError, match="Trainer.num_env_steps is 400, which ends the run before its first update"):
        alfish.train("dqn_cartpole", root_dir=tmp_path / "a", **{**options, "Trainer.num_env_steps": 400})
    with pytest.raises(RunError, match="finished after .* steps without an update, so its policy is untrained"):
        alfish.train(
            "dqn_cartpole",
            root_dir=tmp_path / "b",
            **{**options, "Trainer.num_env_steps": 500, "Trainer.wall_seconds": 1e-6},
        )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_run_killed_in_warm_up_reaches_updates_after_a_restart(tmp_path):
    conf = tmp_path / "toy.gin"
    conf.write_text(
        f"{toy_confs.SAC}\nTrainer.num_env_steps = 1200\nReplayBatches.warmup_env_steps = 1000\n"
        "ReplayBatches.capacity = 1200\nReplayBatches.save = False\nReplayBatches.updates_per_env_step = 0.1\n"
        "CheckpointSaver.period = 500\nEvaluate.num_episodes = 1\n"
    )
    command = ["train", f"--gin_file={conf}", f"--root_dir={tmp_path / 'run'}"]
    saved = Checkpoints(tmp_path / "run" / "checkpoints")
    run_killed_after_a_save(command)
    assert saved.load("latest")[1]["learner"]["updates"] == 0
    assert main(command) == 0
    assert saved.load("latest")[1]["learner"]["updates"] > 0


def test_a_refused_budget_leaves_no_files(tmp_path):
    options = {"conf": "dqn_cartpole", "num_env_steps": 50, "ReplayBatches.warmup_env_steps": 400}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "metrics.csv").write_text("of another\n")
    for name in ("new", "full"):
        with pytest.raises(UsageError, match="which ends the run before its first update"):
            alfish.train(root_dir=tmp_path / name, **options)
    assert not (tmp_path / "new").exists() and (tmp_path / "full" / "metrics.csv").read_text() == "of another\n"


def test_a_refused_python_trainer_leaves_no_files(tmp_path):
    def train(root_dir):
        parts = {"algorithm": PPO, "environment": functools.partial(make_environment, "CartPole-v1")}
        listeners = [Evaluate(num_episodes=1), Evaluate(num_episodes=1)]
        with pytest.raises(UsageError, match="2 Evaluate listeners are called 'evaluation'"):
            Trainer(root_dir, **parts, listeners=listeners, num_iterations=1, device="cpu").train()

    (tmp_path / "mine").mkdir()
    train(tmp_path / "new"), train(tmp_path / "mine")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_budget_below_one_iteration_shows_what_was_done(tmp_path, capsys):
    parts = {"Evaluate.num_episodes": 1, "EpochBatches.num_epochs": 1, "EpochBatches.minibatch_size": None}
    alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "run", num_env_steps=50, **parts)
    said = capsys.readouterr().err
    done = Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1]
    assert 1900 < done < 2048
    assert (
        "An iteration has 2,048 steps, more than Trainer.num_env_steps = 50, and a run has at least one iteration;"
        in said
    )
    assert f"Evaluation at {done:,} steps" in said and f"{done:,} / 50 env steps".replace(",", " ") in said
    assert (tmp_path / "run" / "eval" / f"evaluation-{done:012d}.csv").exists()


# What is unlikely to train well.


@pytest.mark.parametrize(
    ("unroll_length", "num_epochs", "rows"), [(8, 2, 16), (127, 2, 254), (128, 2, None), (8, 1, None)]
)
def test_an_unroll_with_few_rows_for_its_epochs_is_reported(tmp_path, capsys, unroll_length, num_epochs, rows):
    trainer = Trainer(
        tmp_path,
        algorithm=PPO,
        environment=functools.partial(make_environment, "CartPole-v1", num_envs=2),
        batches=functools.partial(EpochBatches, num_epochs=num_epochs),
        unroll_length=unroll_length,
        num_iterations=1,
        listeners=[],
        device="cpu",
    )
    trainer.start()
    trainer.close()
    lines = [line for line in capsys.readouterr().err.splitlines() if "An unroll has" in line]
    said = (
        f"An unroll has {rows} rows, which is few for {num_epochs} epochs of updates; raise "
        "make_environment.num_envs or Trainer.unroll_length (ppo.gin, or conf='ppo' of alfish.train, has 2048 rows), "
        "or lower EpochBatches.num_epochs"
    )
    assert lines == ([] if rows is None else [said])


def test_non_finite_parameters_are_refused_at_load_and_before_done(tmp_path):
    root_dir, weight = tmp_path / "run", []

    class Spoils(Listener):
        def start(self, run):
            weight.append(next(iter(run.algorithm.parameters())))

        def after_iteration(self, run, report):
            if report.finished:
                weight[-1].data.view(-1)[0] = float("nan")

    settings = {"num_env_steps": 64, "unroll_length": 16, "MLP.layers": (4,), "make_environment.num_envs": 1}
    saver = CheckpointSaver(period=16)
    with pytest.raises(RunError, match="run is finished, but its networks are unusable: .* not finite; check rewards"):
        alfish.train("PPO", "CartPole-v1", root_dir=root_dir, listeners=[Spoils(), saver], **settings)
    assert not (root_dir / "done").exists()
    for call in (
        lambda: alfish.load(root_dir),
        lambda: alfish.train(
            "PPO", "CartPole-v1", root_dir=root_dir, on_config_change="new", **settings | {"num_env_steps": 96}
        ),
    ):
        with pytest.raises(UsageError, match="is unusable: .* has values that are not finite; load an earlier one"):
            call()
    earlier = Checkpoints(root_dir / "checkpoints").steps()[0]
    assert alfish.load(root_dir, checkpoint=earlier).env_steps == earlier
