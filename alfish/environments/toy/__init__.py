"""Small environments with known best returns, for trying an algorithm in seconds.

All are `gymnasium.Env`s or vector environments. For example, `make_environment.env_id = @Corridor` builds one.
"""

from alfish.environments.toy.bandits import MaskedIdentity
from alfish.environments.toy.chains import Corridor, HiddenArm, Recall
from alfish.environments.toy.motion import Catch, TensorPointMass

__all__ = ["Catch", "Corridor", "HiddenArm", "MaskedIdentity", "Recall", "TensorPointMass"]
