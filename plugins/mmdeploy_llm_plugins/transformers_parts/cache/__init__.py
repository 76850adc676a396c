"""Holds what transformers' models keep of a sequence in the engine's caches.

pages     keys and values, in pages
states    states of a fixed size, in rows
carriers  the ways in which decoders take and return their states
"""
