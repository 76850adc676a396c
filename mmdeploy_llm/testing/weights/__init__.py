"""Checks formats of quantised weights on weights that they quantise, or on a sample checkpoint."""
