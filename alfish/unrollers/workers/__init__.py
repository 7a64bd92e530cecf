"""Unrollers in processes of their own."""
