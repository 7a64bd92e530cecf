"""Curves, comparisons and HTML pages of runs, made from the files in their directories.

    sources (files -> series) -> grouping (by configuration) -> curves and comparison (statistics) -> drawing, tables

These modules do not import torch, and import matplotlib only to make figures.
"""
