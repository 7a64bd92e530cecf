"""Worker processes, and the pool that starts, supervises and ends them, on this machine and in a host on another one.

Imports neither torch nor anything that imports it, which takes seconds. A host is therefore ready at once, and torch is
imported only by the server, from which workers are forked. Here segments and weights are words of 8 bytes.
"""
