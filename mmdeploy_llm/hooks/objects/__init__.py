"""Interfaces of what plugins build: models, parsers, logits processors. Imported from hooks."""
