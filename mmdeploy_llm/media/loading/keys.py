"""Keys under which processed media are cached and recognised, and their size."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.request import MediaSpan
from mmdeploy_llm.values.adapter_ref import AdapterRef


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


def encoded_by(ref: AdapterRef, spans: tuple[MediaSpan, ...]) -> tuple[MediaSpan, ...]:
    """Returns the media of a prompt that an adapter computes: where it changes what encodes them,
    they have keys of their own."""
    return tuple(_encoded_by(ref, span) for span in spans) if ref.has_media else spans


def _encoded_by(ref: AdapterRef, span: MediaSpan) -> MediaSpan:
    if span.item.embeds is not None:  # nothing encodes it
        return span
    item = replace(span.item, key=f"{span.item.key}@{ref.key}", adapter=ref.key)
    return replace(span, item=item)
