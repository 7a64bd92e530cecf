"""Worker processes, and the pool that starts, supervises and ends them, on this machine or in a Ray host.

Nothing here imports torch, directly or indirectly, because that takes seconds. A host is therefore ready at once, and
torch is imported only by the server, from which workers are forked. In this package, the lengths of segments and
weights are in words of 8 bytes.
"""
