"""Gives LLM its methods for whole batches."""
