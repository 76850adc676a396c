"""Functions that the methods of LLM for whole batches call.

batches.py     run_batch, embed_batch, estimate_batch
reading.py     read
extracting.py  extract
searching.py   search
"""
