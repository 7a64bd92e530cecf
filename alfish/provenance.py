"""What a reader of a run's results wants to know of how they came about."""

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("alfish", "torch", "gymnasium", "numpy", "mujoco", "ale-py", "Box2D", "envpool")


def provenance(device: torch.device, seed: int) -> dict[str, Any]:
    """The command, versions, revision, device, machine, threads and seed, as a dict of JSON values."""
    return {
        "command": sys.argv,
        "versions": {"python": platform.python_version()} | _versions(),
        "git": git_revision(Path(__file__).parent),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "machine": f"{platform.platform()}, {platform.processor() or platform.machine()}",
        "num_threads": torch.get_num_threads(),
        "seed": seed,
    }


def git_revision(directory: Path) -> dict[str, Any] | None:
    """Revision and dirty flag of the checkout that `directory` is in; None where it is in none."""
    try:
        revision, status = (
            subprocess.run(
                ["git", *words], cwd=directory, capture_output=True, text=True, check=True, timeout=10
            ).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"revision": revision.strip(), "dirty": bool(status.strip())}


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
