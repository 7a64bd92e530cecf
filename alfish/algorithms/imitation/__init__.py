"""Algorithms that learn from an expert: from the labels of a trained policy (`Expert`), or from recorded episodes."""
