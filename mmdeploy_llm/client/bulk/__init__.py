"""What LLM's methods for whole batches do, as functions.

batches.py     run_batch, embed_batch, estimate_batch
reading.py     read
extracting.py  extract
searching.py   search
"""
