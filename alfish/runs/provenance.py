"""What a reader of a run's results wants to know of how they came about."""

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from alfish.errors import UsageError
from alfish.runs.files import write_atomically

PACKAGES = ("alfish", "torch", "gymnasium", "numpy", "mujoco", "ale-py", "Box2D", "envpool")


def provenance(device: torch.device, seed: int) -> dict[str, Any]:
    """The time, command, versions, revision, device, machine, threads and seed, as a dict of JSON values."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "versions": {"python": platform.python_version()} | _versions(),
        "git": git_revision(Path(__file__).parent),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "machine": f"{platform.platform()}, {platform.processor() or platform.machine()}",
        "num_threads": torch.get_num_threads(),
        "seed": seed,
    }


def append(path: Path, entry: dict[str, Any]) -> None:
    """Adds an entry to a file that holds a JSON list of them, one for each time that the run was started.

    Raises:
      UsageError: the file holds something else.
    """
    try:
        entries = json.loads(path.read_text()) if path.exists() else []
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a list of how the run came about ({error}); move it away") from error
    if isinstance(entries, dict):  # as older versions wrote the only one
        entries = [entries]
    if not isinstance(entries, list):
        raise UsageError(f"{path} is not a list of how the run came about; move it away")
    write_atomically(path, json.dumps([*entries, entry], indent=2) + "\n")


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
