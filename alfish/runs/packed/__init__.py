"""Packed runs: zip files and repositories of the Hugging Face hub, checked before anything in them is used.

Nothing here unpickles or imports the content that it reads, and nothing uses the network unless the name begins with
`hf:`.
"""
