"""Packed runs: zip files and repositories of the Hugging Face hub, checked before use.

This package does not unpickle or import content, and uses the network only for names that begin with `hf:`.
"""
