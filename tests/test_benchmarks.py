"""The benchmarks run, with tiny budgets. What they measure is not looked at."""

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent.parent
RACE = ["benchmarks.runs.alfish_threshold", "ppo_cartpole", "0", "--max_env_steps=500"]


def run(*arguments: str) -> subprocess.CompletedProcess:
    """A module in a process of its own, from the project's root."""
    return subprocess.run([sys.executable, "-m", *arguments], cwd=PROJECT, capture_output=True, text=True)


def test_a_race_to_the_threshold_trains_the_shipped_conf():
    finished = run(*RACE)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)
    assert result["env_steps"] >= 500 and result["updates"] > 0
    assert not result["reached"] and 0 < result["mean"] < 475


def test_a_race_refuses_a_binding_that_nothing_reads():
    finished = run(*RACE, "--gin_param=Prioritized.alpha=0.5")
    assert finished.returncode != 0
    assert "nothing reads Prioritized.alpha, bound in ppo_cartpole.gin or --gin_param" in finished.stderr
