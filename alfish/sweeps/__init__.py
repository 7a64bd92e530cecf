"""Many runs of one configuration: sweeps over its bindings, and populations.

Run directories are the only state. A process that starts, stops or compares runs derives its next step from these
directories. Such a process can therefore be killed at any time; the same command continues its work.
"""
