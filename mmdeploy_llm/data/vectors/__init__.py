"""Reads files of vectors block by block, finds the nearest ones and groups of near-duplicates.

Memory does not grow with a file: a few bytes are held of each item, and one block of its vectors.
"""

TOP_K = 10  # items that a search returns for each query
