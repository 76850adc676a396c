"""Plain values that callers set and receive. Nothing here imports torch."""
