"""Reads GGUF files: their header, the config that their metadata describe, and their weights.

    find --> header (checked before anything is allocated) --> config    for transformers
                                                           --> reading   entries of floats

lookup finds the table of the file's architecture among the plugins (tables: what a table is); names
finds the keys of tensors. A second file may hold the vision tower: tower/.

Only library.py imports the package `gguf`. This file imports only what finds files:
reading them needs torch.
"""

from mmdeploy_llm.values.options.model_names import GGUF_SUFFIX

from .find import find_gguf, find_tower

__all__ = [
    "GGUF_SUFFIX",
    "find_gguf",
    "find_tower",
]
