"""The networks of a policy, and several policies in one run: who plays whom, their acting in games, and their parts."""

from alfish.policies.lineup import Lineup
from alfish.policies.member import PolicySettings

__all__ = ["Lineup", "PolicySettings"]
