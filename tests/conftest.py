"""What every test starts from."""

import gin
import pytest


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
