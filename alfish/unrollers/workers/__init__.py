"""Collecting in worker processes while the trainer trains."""
