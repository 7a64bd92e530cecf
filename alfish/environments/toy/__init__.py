"""Small environments with known best returns, for tests and for trying a new algorithm in seconds.

All are `gymnasium.Env`s or vector environments. For example, `make_environment.env_id = @Bandit` builds one.
"""

from alfish.environments.toy.bandits import Bandit, MaskedIdentity, NestedBandit
from alfish.environments.toy.chains import Corridor, HiddenArm, OneState, Recall, Stamped
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
