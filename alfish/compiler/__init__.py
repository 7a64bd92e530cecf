"""Conversion of functions of tensors to one compiled graph, one CUDA graph, or one numpy program.

Nothing here depends on RL.
"""
