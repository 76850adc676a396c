"""Readers of corpora, streamed: JSONL, CSV, Parquet, Arrow, WebDataset, Lance and `datasets`."""
