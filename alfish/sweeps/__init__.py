"""Many runs of one configuration: sweeps over its bindings, and the parts that other groups of runs share with sweeps.

Run directories are the only state. A process that starts, stops or compares runs reads the next step from these
directories, so it can be killed at any moment, and the same command continues.
"""
