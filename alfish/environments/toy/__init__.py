"""Small environments with known best returns, for testing an algorithm in seconds.

Each class is a `gymnasium.Env` or a `VectorEnv`. Use them as in `make_environment.env_id = @Corridor`.
"""

from alfish.environments.toy.bandits import MaskedIdentity
from alfish.environments.toy.chains import Corridor, HiddenArm, Recall
from alfish.environments.toy.motion import Catch, TensorPointMass

__all__ = ["Catch", "Corridor", "HiddenArm", "MaskedIdentity", "Recall", "TensorPointMass"]
