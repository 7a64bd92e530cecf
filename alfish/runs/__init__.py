"""What a run leaves behind and how a process is ended: checkpoints, files, logs, generators. Knows no RL."""
