"""Reads GGUF files: their header, the config that their metadata describe, and their weights.

    find --> header (checked before anything is allocated) --> config    for transformers
                                                           --> reading   entries of floats

Only library.py imports the package `gguf`.
"""

from .config import gguf_config
from .find import GGUF_SUFFIX, find_gguf
from .header import Header, read_headers
from .reading import GGUFFile

__all__ = ["GGUF_SUFFIX", "GGUFFile", "Header", "find_gguf", "gguf_config", "read_headers"]
