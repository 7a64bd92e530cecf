"""Networks: encoders of nested observations, torsos, policy and value heads.

Torsos, `ActorCritic`, `QNetwork` and `CriticEnsemble.features` take time steps and the state of their memory, and
return their output and the next state: `policy, state = network.policy(time_step, state)`. Rows are `[B]` or `[T, N]`.
Without memory, any leading dimensions are accepted, and the state is returned unchanged. MLPs, heads and critics map
features to outputs. Sizes come from specs, so no conf repeats a shape.
"""

from alfish.networks.actor_critic import ActorCritic, DeterministicActor, PolicyValue
from alfish.networks.attention_window import AttentionWindow
from alfish.networks.box_heads import BetaHead, BoundedMeanHead, StateDependentNormalHead
from alfish.networks.critics import ONE_CRITIC, CriticEnsemble, PredictiveCritic
from alfish.networks.encoders import Encoder, Flat, OneHot, Torso
from alfish.networks.grids import OneHotGrid
from alfish.networks.heads import FLOORED_HEAD, NormalHead, PolicyHead, head_masks, policy_of
from alfish.networks.hybrid import HybridHead, HybridPolicy, HybridSpace, SquashedNormalHead
from alfish.networks.images import ImpalaCNN, NatureCNN, SmallCNN
from alfish.networks.layers import MLP
from alfish.networks.memory import GRU, LSTM, MinGRU, StackedMemory
from alfish.networks.q_network import ImplicitQNetwork, QNetwork
from alfish.networks.target import TargetNetwork
from alfish.networks.windows import Features, Window, burn_in_state, first_and_bootstrap_rows

__all__ = [
    "GRU",
    "LSTM",
    "MLP",
    "ActorCritic",
    "AttentionWindow",
    "BetaHead",
    "BoundedMeanHead",
    "CriticEnsemble",
    "Encoder",
    "Features",
    "Flat",
    "HybridHead",
    "HybridPolicy",
    "HybridSpace",
    "ImpalaCNN",
    "ImplicitQNetwork",
    "MinGRU",
    "NatureCNN",
    "NormalHead",
    "OneHot",
    "OneHotGrid",
    "PolicyHead",
    "PredictiveCritic",
    "QNetwork",
    "SmallCNN",
    "SquashedNormalHead",
    "StackedMemory",
    "StateDependentNormalHead",
    "TargetNetwork",
    "Torso",
    "Window",
    "burn_in_state",
    "first_and_bootstrap_rows",
    "head_masks",
    "policy_of",
    "ONE_CRITIC",
    "FLOORED_HEAD",
    "PolicyValue",
    "DeterministicActor",
]
