"""Checks of attention backends, on random paged caches, against plain attention in float64."""
