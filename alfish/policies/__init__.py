"""Building and loading the networks of a policy, and runs with several policies, which act in games."""

from alfish.policies.lineup import Lineup
from alfish.policies.member import PolicySettings

__all__ = ["Lineup", "PolicySettings"]
