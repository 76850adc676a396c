"""Rows of corpora as items of a batch: which columns are used, and what is asked about them."""
