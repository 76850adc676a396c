"""Rows in, records out: files, corpora, records, and the outputs that hold them."""
