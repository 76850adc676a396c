"""Reads GGUF files: their header, the config that their metadata describe, and their weights.

    find --> header (checked before anything is allocated) --> config    for transformers
                                                           --> reading   entries of floats

lookup finds the table of the file's architecture among the plugins (tables: what a table is); names
finds the keys of tensors. A second file may hold the vision tower: tower/.

Only library.py imports the package `gguf`.
"""

from .config import gguf_config
from .find import GGUF_SUFFIX, find_gguf, find_tower
from .header import Header, read_headers
from .lookup import Tables, find_tables
from .reading import GGUFFile
from .tower import MediaConfig, TowerFile, media_config

__all__ = [
    "GGUF_SUFFIX",
    "GGUFFile",
    "Header",
    "MediaConfig",
    "Tables",
    "TowerFile",
    "find_gguf",
    "find_tables",
    "find_tower",
    "gguf_config",
    "media_config",
    "read_headers",
]
