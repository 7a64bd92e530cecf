"""A configuration whose runs take a second, and whose environment can be continued exactly."""

import pytest

TOY = """
include 'ppo.gin'
import alfish.environments.toy
make_environment.env_id = @TensorPointMass
make_environment.num_envs = 8
TensorPointMass.length = 10
Trainer.num_env_steps = 2000
Trainer.unroll_length = 16
Trainer.listeners = [@Evaluate(), @CheckpointSaver()]
EpochBatches.minibatch_size = 64
EpochBatches.num_epochs = 2
MLP.layers = (8,)
Evaluate.period = 500
Evaluate.num_episodes = 8
CheckpointSaver.period = 256
"""


@pytest.fixture
def toy(tmp_path):
    """The file of the configuration."""
    path = tmp_path / "toy.gin"
    path.write_text(TOY)
    return path
