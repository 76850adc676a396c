"""Reads GGUF files: their header, the config that their metadata describe, and their weights.

    find --> header (checked before anything is allocated) --> config    for transformers
                                                           --> reading   entries of floats

A second file may hold the vision tower: tower/.

Only library.py imports the package `gguf`.
"""

from .config import gguf_config
from .families import family_of
from .find import GGUF_SUFFIX, find_gguf, find_tower
from .header import Header, read_headers
from .reading import GGUFFile
from .tower import MediaConfig, TowerFile, media_config

__all__ = [
    "GGUF_SUFFIX",
    "GGUFFile",
    "Header",
    "MediaConfig",
    "TowerFile",
    "family_of",
    "find_gguf",
    "find_tower",
    "gguf_config",
    "media_config",
    "read_headers",
]
