"""Worker processes, and the pool that starts, supervises and ends them, on this machine or in a Ray host.

This package does not import torch, because that takes seconds. A host is therefore ready at once; only the server, from
which workers are forked, imports torch. Sizes of segments and weights are in words of 8 bytes.
"""
