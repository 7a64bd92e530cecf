"""Layers of bodies; a body is the part of a network between its inputs and its head."""
