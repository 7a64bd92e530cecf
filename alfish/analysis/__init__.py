"""Curves, comparisons and pages of finished or running runs, read from their directories; nothing is trained.

    sources (files -> series) -> grouping (by configuration) -> curves and comparison (statistics) -> drawing, tables

These modules do not import torch, and import matplotlib only where a figure is made.
"""
