"""The checks that every plugin must pass, as plain functions that do not need pytest."""
