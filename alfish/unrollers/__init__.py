"""Unrollers: a policy and environments in, rows of experience out."""

from alfish.unrollers.sync import SyncUnroller
from alfish.unrollers.unroller import StepRecords, Unroller
from alfish.unrollers.workers.asynchronous import AsyncUnroller
from alfish.unrollers.workers.pool import Workers

__all__ = ["StepRecords", "AsyncUnroller", "SyncUnroller", "Unroller", "Workers"]
