"""Measurements: throughput beside peers, and what the confs reach. Not part of the package."""

from pathlib import Path

PROJECT = Path(__file__).parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
