"""Unrollers: a policy and environments in, rows of experience out."""

from alfish.unrollers.sync import SyncUnroller

__all__ = ["SyncUnroller"]
