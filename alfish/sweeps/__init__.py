"""Many runs of one configuration: sweeps over its bindings, and what other groups of runs share with them.

Run directories are the only state. What starts, stops or compares runs reads from these directories what to do next, so
it can be killed at any moment, and the same command continues.
"""
