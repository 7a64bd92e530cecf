"""Workers on the machines of a Ray cluster. Ray is imported when a run connects to a cluster."""

from alfish.unrollers.ray.ray_workers import RayWorkers

__all__ = ["RayWorkers"]
