"""Encoder outputs by media key. What is kept, and for how long, is the scheduler's decision; here
are the tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import Model
from mmdeploy_llm.hooks.contracts import media_size
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.request import MediaInput

logger = logging.getLogger(__name__)

# Values of pixels in one encoder call: more at once gains no speed and only needs larger buffers.
MAX_VALUES_PER_CALL = 8 * 2**20


class EncoderCache:
    """Embeddings [num_tokens, media_size] of media that running requests still need. The runner
    is its only writer."""

    def __init__(self, model: Model, name: str = "the model") -> None:
        """name: the model in messages."""
        self._model = model
        self._name = name
        self._media_size = media_size(model)
        self._embeds: dict[str, Tensor] = {}
        self._failures: dict[str, str] = {}

    def forget(self, keys: Iterable[str]) -> None:
        """Drops outputs that the scheduler no longer counts."""
        for key in keys:
            self._embeds.pop(key, None)
            self._failures.pop(key, None)

    def encode(self, items: Sequence[MediaInput]) -> None:
        """Encodes all items, several in one call. An item that fails is remembered; the
        others are not harmed."""
        for batch in _batches(items):
            try:
                self._encode(batch)
            except FAULTS:
                logger.debug(
                    "an encoder call failed; its items are tried one by one", exc_info=True
                )
                for item in batch:
                    self._encode_alone(item)

    def get(self, key: str) -> Tensor | None:
        """The item's embeddings, or None when it could not be encoded."""
        return self._embeds.get(key)

    def failure(self, key: str) -> str:
        """Why `get` gives None."""
        return self._failures.get(key, "its encoder output is not available")

    def _encode_alone(self, item: MediaInput) -> None:
        try:
            self._encode([item])
        except FAULTS as error:
            self._failures[item.key] = f"the {item.kind} could not be encoded: {error_text(error)}"
            logger.warning("a media item could not be encoded", exc_info=True)

    def _encode(self, items: Sequence[MediaInput]) -> None:
        embeds = self._model.encode_media(items)
        if len(embeds) != len(items):
            raise PluginContractError(
                f"encode_media of {self._name} gave {len(embeds)} outputs for {len(items)} items"
            )
        for item, rows in zip(items, embeds, strict=True):
            if tuple(rows.shape) != (item.num_tokens, self._media_size):
                raise PluginContractError(
                    f"encode_media of {self._name} gave {tuple(rows.shape)} for an item of "
                    f"{item.num_tokens} tokens, must be {(item.num_tokens, self._media_size)}"
                )
        for item, rows in zip(items, embeds, strict=True):
            # A copy of its own, so that a small item does not keep its whole batch alive.
            self._embeds[item.key] = rows.clone() if len(items) > 1 else rows


def _batches(items: Sequence[MediaInput]) -> Iterator[list[MediaInput]]:
    """Items of one kind, in order, at most MAX_VALUES_PER_CALL tensor values in a batch (or one
    item)."""
    batch: list[MediaInput] = []
    num_values = 0
    for item in items:
        size = sum(tensor.numel() for tensor in item.tensors.values())
        is_full = num_values + size > MAX_VALUES_PER_CALL or (batch and batch[0].kind != item.kind)
        if batch and is_full:
            yield batch
            batch, num_values = [], 0
        batch.append(item)
        num_values += size
    if batch:
        yield batch
