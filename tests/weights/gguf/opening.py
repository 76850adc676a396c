"""Opens GGUF files without a model: whoever calls says which keys it would have."""

from __future__ import annotations

import re

import torch

from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.weights.gguf.header import read_headers
from mmdeploy_llm.weights.gguf.lookup import find_tables
from mmdeploy_llm.weights.gguf.reading import GGUFFile
from mmdeploy_llm.weights.gguf.tower import TowerFile


def tables_of(text, tower=None):
    """Returns the tables of the built-in plugins, for these headers."""
    return find_tables(PluginManager.load(), text, tower)[1]


def any_key(key):
    """Says that a model has whatever is asked for: the first name that the tables offer wins."""
    del key
    return True


USUAL = re.compile(
    r"lm_head\.weight|model\.(embed_tokens\.weight|norm\.weight|layers\.\d+\.(self_attn|mlp)\..*)"
    r"|model\.layers\.\d+\.(input|post_attention)_layernorm\.weight"
)


def usual_key(key):
    """Says that a model has the keys of the standard decoder."""
    return USUAL.fullmatch(key) is not None


def opened(paths, has_key=any_key):
    header = read_headers(paths)
    return GGUFFile(header, tables_of(header).model(header), has_key)


def opened_tower(path, has_key=any_key):
    header = read_headers([path])
    return TowerFile(header, tables_of(header, header).tower(header), has_key)


def stored(file):
    """Reads all that a model would see, by key."""
    found = {}
    with file:
        for key, entry in file.entries.items():
            found[key] = torch.empty(entry.shape, dtype=entry.dtype)
            file.read_into(key, found[key], first_value=0, transpose=False)
    return found
