"""Unrollers: act with a policy in environments, and collect rows of experience."""

from alfish.unrollers.chunks import CompiledUnroller
from alfish.unrollers.double_buffered import DoubleBufferedUnroller
from alfish.unrollers.on_device import DeviceUnroller
from alfish.unrollers.on_host import HostUnroller
from alfish.unrollers.sync import SyncUnroller
from alfish.unrollers.unroller import StepRecords, Unroller
from alfish.unrollers.workers.asynchronous import AsyncUnroller
from alfish.unrollers.workers.transport import Workers

__all__ = [
    "StepRecords",
    "AsyncUnroller",
    "CompiledUnroller",
    "DeviceUnroller",
    "DoubleBufferedUnroller",
    "HostUnroller",
    "SyncUnroller",
    "Unroller",
    "Workers",
]
