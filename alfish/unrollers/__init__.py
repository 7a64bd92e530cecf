"""Unrollers: a policy and environments in, rows of experience out."""

from alfish.unrollers.asynchronous import AsyncUnroller
from alfish.unrollers.sync import SyncUnroller
from alfish.unrollers.unroller import Arrivals, Unroller
from alfish.unrollers.workers import Workers

__all__ = ["Arrivals", "AsyncUnroller", "SyncUnroller", "Unroller", "Workers"]
