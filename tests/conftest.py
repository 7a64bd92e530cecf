"""What every test starts from."""

import gc

import gin
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects without garbage collection, which takes a third of the time and finds nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()  # also in the process that collects no tests, because others run them


def pytest_collection_finish():
    """Excludes imported modules and collected tests from garbage collection, which else visits them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_gin_configuration():
    """The command line configures gin for the process; a test leaves nothing of it behind."""
    yield
    gin.clear_config()  # also unlocks it


@pytest.fixture
def interpreted():
    """Runs graphs operation by operation in place of compiling them."""
    import plain_graphs  # imports torch, which not every test needs

    with plain_graphs.interpreted():
        yield
