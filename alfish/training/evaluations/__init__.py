"""Results of evaluations, and evaluations of checkpoints by a process other than the training process."""
