"""Algorithms that learn from an expert: a trained policy that labels rows (`Expert`), or its recorded episodes."""
