"""Small environments with known best returns, for tests and for trying a new algorithm in seconds.

All are `gymnasium.Env`s or vector environments. Build them with `make_environment.env_id = @Bandit` and the like.
"""

from alfish.environments.toy.bandits import Bandit, MaskedIdentity, NestedBandit
from alfish.environments.toy.chains import Corridor, OneState, Stamped
from alfish.environments.toy.memory import HiddenArm, Recall
from alfish.environments.toy.motion import Catch, TensorPointMass

__all__ = [
    "Bandit",
    "Catch",
    "Corridor",
    "HiddenArm",
    "MaskedIdentity",
    "NestedBandit",
    "OneState",
    "Recall",
    "Stamped",
    "TensorPointMass",
]
