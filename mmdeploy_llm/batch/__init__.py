"""Batches over files: inputs in, results out as they finish, an HTML report."""
