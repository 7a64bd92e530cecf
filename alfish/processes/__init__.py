"""Worker processes, and the pool that starts, supervises and ends them, on this machine and in a host on another one.

Nothing here imports torch, directly or indirectly, because that takes seconds. A host is therefore ready at once, and
torch is imported only by the server, from which workers are forked. In this package, segments and weights are words of
8 bytes.
"""
