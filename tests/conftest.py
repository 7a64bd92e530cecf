"""What every test starts from."""

import gc
import logging
import os
import sys

import gin
import modules
import pytest

from alfish.__main__ import main


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects without garbage collection, which takes a third of the time and finds nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()  # also in the process that collects no tests, because others run them


def pytest_collection_finish():
    """Excludes imported modules and collected tests from garbage collection, which else visits them each time.

    Collections are rarer too: a whole one visits what PyTorch's compiler has imported since, for 0.2 s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True  # else pytest adds its handlers to each logger of torch, six times a test
    torch = sys.modules.get("torch")
    if torch and not torch.accelerator.is_available():
        # Without a device, the original only formats the call stack for each kind of device: 4 % of the tests' time.
        torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def no_gin_configuration(tmp_path_factory):
    """The command line configures gin for the process; a test leaves nothing of it behind.

    Neither does it leave names of modules that it has written, which workers of other tests cannot import.
    """
    known = len(gin.config._REGISTRY)
    yield
    gin.clear_config()  # also unlocks it
    if len(gin.config._REGISTRY) > known:
        modules.forget(modules.imported_below(str(tmp_path_factory.getbasetemp())))


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory):
    """Tests record what they train apart from the user's runs; so do the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.delenv("ALFISH_ALLOW_IMPORT", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def files_stay_in_memory():
    """Files need not outlive a power cut; for each one, the disk takes milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def untried_training(monkeypatch):
    """`alfish check-env` names a speed of training, without the seconds in which it tries one."""
    monkeypatch.setattr("alfish.bin.first_run.training_speed", lambda task, base: 200.0)


@pytest.fixture
def interpreted():
    """Runs graphs operation by operation in place of compiling them."""
    import plain_graphs  # imports torch, which not every test needs

    with plain_graphs.interpreted():
        yield


@pytest.fixture
def refused(capsys):
    """Asserts that a command fails with one sentence; returns it."""

    def refused(*arguments, status=2, printed=False):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == status
        captured = capsys.readouterr()
        assert bool(captured.out) == printed and "Traceback" not in captured.err
        assert captured.err.startswith("alfish") and "In call to configurable" not in captured.err
        return captured.err

    return refused
