"""Provenance of a run: command, versions, revision and machine."""

import functools
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
from alfish.runs import contents

PACKAGES = ("alfish", "torch", "gymnasium", "numpy", "mujoco", "ale-py", "Box2D", "envpool")


def provenance(device: torch.device, seed: int, num_threads: int | str) -> dict[str, Any]:
    """Returns time, command, versions, revision, device, machine, threads and seed as JSON values."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "versions": {"python": platform.python_version()} | _versions(),
        "git": git_revision(Path(__file__).parent),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "machine": f"{platform.platform()}, {platform.processor() or platform.machine()}",
        "num_threads": num_threads,
        "seed": seed,
    }


def with_entry(directory: Path, entry: dict[str, Any]) -> str:
    """Returns the text of a run's `provenance.json`, a JSON list of one entry per start, with `entry` appended.

    Raises:
      UsageError: the file is neither a JSON list nor a JSON object.
    """
    path = directory / "provenance.json"
    entries = contents.json_value(directory, path.name) or []
    if isinstance(entries, dict):  # older versions wrote a single entry
        entries = [entries]
    if not isinstance(entries, list):
        raise UsageError(f"{path} does not hold the run's history; move it away")
    return json.dumps([*entries, entry], indent=2) + "\n"


@functools.cache
def git_revision(directory: Path) -> dict[str, Any] | None:
    """Returns revision and dirty flag of the git checkout around `directory`; None without a checkout.

    Git is called only once, because a process keeps the code that it has imported.
    """
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


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
