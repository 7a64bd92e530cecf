"""Results of evaluations, and evaluations of checkpoints by another process than the training."""
