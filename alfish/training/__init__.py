"""The trainer, its clock and run directory, listeners, evaluation, and the trained policy."""
