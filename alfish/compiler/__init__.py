"""Conversion of a function of tensors to a compiled graph, a CUDA graph, or a numpy program.

Nothing here depends on RL.
"""
