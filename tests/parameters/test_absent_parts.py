"""A policy is opened without the parts of its training that it does not use, in a process that lacks them."""

import contextlib
import os
import runpy
import sys
import traceback

import gin
import pytest

import alfish
from alfish.__main__ import main
from alfish.configuration import reading
from alfish.configuration.opening import open_run
from alfish.errors import UsageError

PROGRAM = """
import sys
import gymnasium
import alfish
from alfish.metrics import Metric
from alfish.networks import ActorCritic
from alfish.training.listener import Listener


class Task(gymnasium.Wrapper):
    def __init__(self, size=1):
        super().__init__(gymnasium.make("CartPole-v1"))


class Returns(Metric):
    name = "Ours"

    def update(self, rows):
        pass

    def result(self):
        return {"ours": 1.0}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Watcher(Listener):
    def after_iteration(self, run, report):
        pass


class Net(ActorCritic):
    pass


def evaluation(**options):
    from alfish.environments import make_environment
    return make_environment(Task, **options)


settings = {
    "lambda": ("PPO", lambda: Task(), {}),
    "class": ("PPO", Task, {"make_environment.env_kwargs": {"size": 2}}),
    "listener": ("PPO", "CartPole-v1", {"extra_listeners": [Watcher()]}),
    "metric": ("PPO", "CartPole-v1", {"extra_metrics": [Returns()]}),
    "evaluation": ("PPO", "CartPole-v1", {"evaluation_environment": evaluation}),
    "network": ("PPO", "CartPole-v1", {"PPO.network": Net}),
}
for name in sys.argv[2:]:
    algorithm, environment, others = settings[name]
    small = {"MLP.layers": (4,), "EpochBatches.num_epochs": 1, "num_env_steps": 64, "unroll_length": 32}
    alfish.train(algorithm, environment, root_dir=f"{sys.argv[1]}/{name}", **(small | others))
"""
OPENED = ["lambda", "class", "listener", "metric", "evaluation"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a program that this process has not imported; a copy of it executes the program."""
    directory = tmp_path_factory.mktemp("runs")
    (directory / "program.py").write_text(PROGRAM)
    process = os.fork()
    if not process:
        status = 70
        try:
            sys.argv = [str(directory / "program.py"), str(directory), *OPENED, "network"]
            runpy.run_path(sys.argv[0], run_name="__main__")
            status = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    assert os.waitpid(process, 0)[1] == 0
    return directory


@pytest.mark.parametrize("name", OPENED)
def test_a_policy_acts_without_the_parts_of_its_training(runs, name):
    assert alfish.load(runs / name).act([0.0, 0.0, 0.0, 0.0]) in (0, 1)
    assert gin.config_str() == ""


@pytest.mark.parametrize("name", ["listener", "metric"])
def test_an_evaluation_needs_no_listeners_and_metrics(runs, name):
    assert main(["evaluate", f"--root_dir={runs / name}", "--num_episodes=1"]) == 0


def test_a_part_that_is_used_is_named(runs, capsys):
    words = "there is no class or function {!r} in __main__; define it in a separate module, because"
    with pytest.raises(UsageError, match=words.format("Net")):
        alfish.load(runs / "network")
    assert main(["evaluate", f"--root_dir={runs / 'class'}", "--num_episodes=1"]) == 2
    assert words.format("Task") in capsys.readouterr().err


@pytest.fixture
def lab(runs, tmp_path, monkeypatch):
    """A function that makes a run that imports `absent_lab`, a module that leaves a mark when it is executed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "absent_lab.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(runs / "metric" / "checkpoints")
    saved = (runs / "metric" / "config.gin").read_text()

    def write(text):
        (tmp_path / "run" / "config.gin").write_text(text + saved)
        return tmp_path / "run"

    yield write
    assert not (tmp_path / "executed").exists() and "absent_lab" not in sys.modules


USES = """import absent_lab
absent_lab.AbsentReach.size = 3
AbsentReach.other = {'a': @absent_lab.Goal()}
make_environment.wrappers = [@first/absent_lab.Wrapper]
"""


def test_a_module_of_the_environment_needs_no_permission(lab):
    root_dir = lab(USES)
    assert alfish.load(root_dir).act([0.0, 0.0, 0.0, 0.0]) in (0, 1)
    with pytest.raises(UsageError, match="imports 'absent_lab', which is not part of alfish"), open_run(root_dir):
        pass
    with pytest.raises(UsageError, match="imports 'absent_lab'"), reading.saved(root_dir / "config.gin"):
        pass


@pytest.mark.parametrize("use", ["ActorCritic.policy_head = @absent_lab.Head", "MLP.bias = @absent_lab.Head()"])
def test_a_missing_policy_module_is_requested(lab, use):
    words = "^absent_lab.Head is unknown here: .*config.gin imports 'absent_lab', which is not part of alfish; if you"
    with pytest.raises(UsageError, match=words) as error:
        alfish.load(lab(f"import absent_lab\n{use}\n"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["import \\\n absent_lab\n", "import absent_lab as lab\n", "from absent_lab import x\n"]
)
def test_no_way_of_writing_an_import_executes_it(lab, text):
    with contextlib.suppress(UsageError):
        alfish.load(lab(text))


def test_an_unknown_name_of_an_installed_module_is_an_error(lab):
    with pytest.raises(UsageError, match="No configurable matching"):
        alfish.load(lab("make_environment.wrappers = [@Gone]\n"))
