"""Chooses the next token of every request from its logits, vectorised over the batch."""
