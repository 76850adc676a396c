"""Attention over the paged KV cache: several backends of the one interface that
hooks/objects/attention.py defines, and the function that selects one (select.py)."""
