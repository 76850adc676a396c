"""Writes checkpoints: merged, converted, in few bits."""
