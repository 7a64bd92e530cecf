"""Adapters of simulators: a module for each library."""
