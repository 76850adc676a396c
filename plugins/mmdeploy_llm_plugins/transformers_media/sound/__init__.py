"""Prepares sounds with the feature extractors that transformers has for a model."""
