"""Curves, comparisons and pages of runs: `alfish plot` and `alfish compare`. Reads run directories, and trains nothing.

    sources (files -> series) -> grouping (by configuration) -> curves and comparison (statistics) -> drawing, tables

No module here imports torch, and matplotlib is imported where a figure is made.
"""
