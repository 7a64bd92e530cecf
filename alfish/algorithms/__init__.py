"""Algorithms, one per file, each a subclass of `RLAlgorithm`."""
