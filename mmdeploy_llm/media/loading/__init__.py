"""Turns media of any form into model inputs: forms, embeddings, caches, the loader."""
