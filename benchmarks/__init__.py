"""Measurements: throughput beside peers, and what the confs reach. Not part of the package."""
