"""Adapters of simulators, one module per library."""
