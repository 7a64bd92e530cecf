"""Export of policies that act without alfish: ONNX, numpy, and torch files.

Each file is written from a recorded graph of a policy's step (`graph`). It is kept only if it acts like the policy
(`verification`).
"""
