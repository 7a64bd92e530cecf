"""Configurations written in gin: they are located, read, checked, and made into runs.

`reading` parses a configuration into gin and returns its bindings; `runs` and `opening` build Trainers from it. Each of
the other modules has one check or one lookup. Private names of gin are used in `parameters.gin_internals` only.
"""
