"""Exports the records of batches from the formats of outputs to those of training, search and
evaluation: `FORMATS` in formats.py has one row for each."""
