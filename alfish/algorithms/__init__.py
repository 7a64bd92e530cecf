"""One algorithm a file, each a subclass of `RLAlgorithm`; siblings never import one another."""
