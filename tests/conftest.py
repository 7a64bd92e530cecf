"""What every test starts from."""

import gin
import pytest


@pytest.fixture(autouse=True)
def no_gin_configuration():
    """The command line configures gin for the process; a test leaves nothing of it behind."""
    yield
    with gin.unlock_config():
        gin.clear_config()
