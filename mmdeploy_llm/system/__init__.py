"""Processes, files, limits and ranks of a machine. Nothing here knows a model."""
