"""Networks: encoders of nested observations, torsos, policy and value heads.

What sees time steps (torsos, `ActorCritic`, `QNetwork`, `CriticEnsemble.features`) takes them with the state of its
memory, and gives back its output and the state carried on: `policy, state = network.policy(time_step, state)`. Rows are
`[B]` or `[T, N]`; without memory any leading dims will do, and the state goes through untouched. What stands on
features (MLPs, heads, critics) maps features alone. Sizes come from specs, so no conf repeats a shape.
"""

from alfish.networks.actor_critic import ActorCritic, PolicyValue
from alfish.networks.actors import DeterministicActor
from alfish.networks.critics import ONE_CRITIC, CriticEnsemble
from alfish.networks.encoders import Encoder, Flat, OneHot
from alfish.networks.heads import FLOORED_HEAD, PolicyHead
from alfish.networks.hybrid_policy import HybridHead, HybridPolicy, HybridSpace, SquashedNormalHead
from alfish.networks.images import ImpalaCNN, NatureCNN, SmallCNN
from alfish.networks.memory import GRU, LSTM
from alfish.networks.q_network import QNetwork
from alfish.networks.target import TargetNetwork
from alfish.networks.torsos import MLP, Torso
from alfish.networks.windows import Window, burn_in_state

__all__ = [
    "GRU",
    "LSTM",
    "MLP",
    "ActorCritic",
    "CriticEnsemble",
    "Encoder",
    "Flat",
    "HybridHead",
    "HybridPolicy",
    "HybridSpace",
    "ImpalaCNN",
    "NatureCNN",
    "OneHot",
    "PolicyHead",
    "QNetwork",
    "SmallCNN",
    "SquashedNormalHead",
    "TargetNetwork",
    "Torso",
    "Window",
    "burn_in_state",
    "ONE_CRITIC",
    "FLOORED_HEAD",
    "PolicyValue",
    "DeterministicActor",
]
