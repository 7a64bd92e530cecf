"""The networks of a policy; and several policies in one run: their parts, their agents, and acting in games."""

from alfish.policies.lineup import Lineup
from alfish.policies.member import PolicySettings

__all__ = ["Lineup", "PolicySettings"]
