"""Functions of tensors as one compiled graph, one CUDA graph, or one numpy program. Nothing here depends on RL."""
