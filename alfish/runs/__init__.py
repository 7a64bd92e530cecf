"""Files of a run (checkpoints, configuration, logs), its random generators, and the end of a process."""
