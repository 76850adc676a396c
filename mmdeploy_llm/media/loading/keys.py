"""Keys under which processed media are cached and recognised, and their size."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.messages import MediaItem


def num_bytes(item: MediaInput) -> int:
    """Returns the bytes of an item's tensors."""
    return sum(tensor.nbytes for tensor in item.tensors.values())


def keyed(key: str, made: MediaInput) -> MediaInput:
    """Returns the item with a key that differs wherever its file or options do, whatever the
    processor's own key says: two pictures with one key would share what is cached."""
    both = blake2b(f"{key}\0{made.key}".encode(), digest_size=20)
    return replace(made, key=both.hexdigest())


def key_of(item: MediaItem, form: str, content: bytes) -> str:
    """Returns a key for content and options, distinct for encoded and decoded items."""
    options = sorted(item.options.items())
    digest = blake2b(f"{item.kind}\0{form}\0{options!r}\0".encode(), digest_size=20)
    digest.update(content)
    return digest.hexdigest()
