"""Policies that act without alfish: as ONNX, as a file of numpy calls, and as a torch program.

All formats are written from one recorded graph of a policy's step (`graph`), and compared with the policy itself
(`verification`) before they are kept.
"""
