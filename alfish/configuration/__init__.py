"""Locates, reads and checks configurations written in gin, and builds runs from them.

`reading` parses a configuration into gin and returns its bindings; `runs` and `opening` build a Trainer from the parsed
configuration. Each other module has one check or one lookup. Only `parameters.gin_internals` uses gin's private names.
"""
