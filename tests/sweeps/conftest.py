"""A gin file for the runs of a group."""

import pytest
import toy_confs


@pytest.fixture
def toy(tmp_path):
    """The file of a configuration of PPO."""
    path = tmp_path / "toy.gin"
    path.write_text(toy_confs.PPO)
    return path
