"""Networks: encoders of nested observations, torsos, policy and value heads.

Every network takes any number of leading dims (`[B]`, `[T, B]`, `[1, N]`) and keeps them. Sizes come from specs, so no
conf repeats a shape.
"""

from alfish.networks.actor_critic import ActorCritic
from alfish.networks.critics import CriticEnsemble, QNetwork
from alfish.networks.encoders import Encoder, Flat, ImpalaCNN, NatureCNN, OneHot
from alfish.networks.heads import PolicyHead, SquashedNormalHead
from alfish.networks.target import Target
from alfish.networks.torsos import MLP, Torso

__all__ = [
    "MLP",
    "ActorCritic",
    "CriticEnsemble",
    "Encoder",
    "Flat",
    "ImpalaCNN",
    "NatureCNN",
    "OneHot",
    "PolicyHead",
    "QNetwork",
    "SquashedNormalHead",
    "Target",
    "Torso",
]
