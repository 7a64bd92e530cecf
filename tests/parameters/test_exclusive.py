"""A process has one configuration and one set of random generators: one thread at a time trains or reads a run."""

import threading

import gymnasium
import pytest

import alfish
from alfish.algorithms.ppo import PPO
from alfish.configuration.opening import open_run
from alfish.errors import UsageError
from alfish.parameters import exclusive

SETTINGS = {
    "num_env_steps": 64, "unroll_length": 16, "make_environment.num_envs": 2, "MLP.layers": (4,),
    "EpochBatches.minibatch_size": 16, "Evaluate.num_episodes": 1, "CheckpointSaver.period": 64,
}  # fmt: skip
BUSY = "another thread of this process trains or has a run open.*`alfish sweep`"


class Waiting(gymnasium.Wrapper):
    """CartPole whose steps wait until they may go on."""

    begun, may_go_on = threading.Event(), threading.Event()

    def __init__(self, render_mode=None):
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action):
        self.begun.set()
        assert self.may_go_on.wait(60)
        return super().step(action)


@pytest.fixture
def under_way(tmp_path):
    """A run that another thread trains, and that waits."""
    Waiting.begun.clear(), Waiting.may_go_on.clear()
    results = []
    train = lambda: results.append(alfish.train("PPO", Waiting, root_dir=tmp_path / "first", **SETTINGS))  # noqa: E731
    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert Waiting.begun.wait(60)
        yield results
    finally:
        Waiting.may_go_on.set()
        thread.join()
    assert len(results) == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root_dir = tmp_path_factory.mktemp("runs") / "ppo"
    alfish.train("PPO", "CartPole-v1", root_dir=root_dir, **SETTINGS)
    return root_dir


def test_a_second_run_in_another_thread_is_refused(under_way, trained, tmp_path):
    for call in (
        lambda: alfish.train("PPO", "CartPole-v1", root_dir=tmp_path / "second", **SETTINGS),
        lambda: alfish.load(trained),
        lambda: open_run(trained).__enter__(),
        lambda: alfish.Trainer(tmp_path / "third", algorithm=PPO, num_env_steps=64),
    ):
        with pytest.raises(UsageError, match=BUSY):
            call()
    assert not (tmp_path / "second").exists() and not (tmp_path / "third").exists() and not under_way


def test_policies_are_loaded_in_several_threads_at_once(trained):
    found = []
    threads = [threading.Thread(target=lambda: found.append(alfish.load(trained))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    alfish.train("PPO", "CartPole-v1", root_dir=trained, **SETTINGS)  # nothing is held any more


def test_contexts_of_one_thread_are_inside_each_other():
    with exclusive.held(), exclusive.held(brief=True):
        exclusive.check()
        with exclusive.held():
            pass
    outcome = []

    def other():
        try:
            exclusive.check()
            outcome.append("free")
        except UsageError:
            outcome.append("busy")

    for context, expected in ((exclusive.held(), "busy"), (exclusive.held(brief=True), None)):
        with context:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(0.3)
            assert outcome == ([expected] if expected else [])
        thread.join()
        outcome.clear()
