"""Algorithms that learn from an `Expert`, which labels rows with actions, or from recorded episodes."""
