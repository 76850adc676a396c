"""Runs a model in plain ways and compares them: dense, paged, on ranks, as transformers does."""
