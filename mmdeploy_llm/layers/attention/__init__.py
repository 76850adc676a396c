"""Attention over the paged KV cache: one interface (base.py), several backends, and the function
that selects one (select.py)."""
