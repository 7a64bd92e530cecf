"""Functions of tensors as one graph, one launch of a GPU, or a numpy program. Knows no RL."""
