"""Encoder outputs by media key. What is kept, and for how long, is the scheduler's decision; here
are the tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import Model
from mmdeploy_llm.hooks.contracts import media_size
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.request import MediaInput

from .out_of_memory import give_back_memory, is_out_of_memory
from .peers import NoPeers, Peers

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
LEAST_SENT = 4096  # values: smaller tensors are read by the host too, and cost no time to copy


def values_per_call(device: torch.device) -> int:
    """Values of pixels in one encoder call: on a CPU more at once gains no speed and only needs
    larger buffers, a GPU needs more to be busy."""
    return (32 if device.type == "cuda" else 8) * 2**20


class EncoderCache:
    """Embeddings [num_tokens, media_size] of media that running requests still need. The runner
    is its only writer."""

    def __init__(
        self,
        model: Model,
        name: str = "the model",
        device: torch.device = CPU,
        peers: Peers | None = None,
    ) -> None:
        """name: the model in messages. device: of its weights. peers: None where the model is not
        shared."""
        self._peers = peers or NoPeers()
        self._model = model
        self._name = name
        self._device = device
        self._copies = MediaCopies(device)
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
        if not items:
            return
        batches = [*_batches(items, values_per_call(self._device))]
        sent = self._copies.send(batches[0])
        for number, batch in enumerate(batches):
            here = sent
            sent = self._copies.send(batches[number + 1]) if number + 1 < len(batches) else []
            error = self._error_of(self._copies.wait_for(here))
            del here
            if error is not None:
                self._encode_alone(batch, error)

    def get(self, key: str) -> Tensor | None:
        """The item's embeddings, or None when it could not be encoded."""
        return self._embeds.get(key)

    def failure(self, key: str) -> str:
        """Why `get` gives None."""
        return self._failures.get(key, "its encoder output is not available")

    def _error_of(self, items: Sequence[MediaInput]) -> BaseException | None:
        """One call; why it failed, if so, without what it held in memory."""
        try:
            self._encode(items)
        except FAULTS as error:
            self._peers.raised(error)
            is_known = is_out_of_memory(error)
            logger.debug("an encoder call failed", exc_info=None if is_known else error)
            return error.with_traceback(None)
        return None

    def _encode_alone(self, items: Sequence[MediaInput], error: BaseException) -> None:
        """Items of a call that failed, one by one."""
        for item in items:
            if is_out_of_memory(error):
                give_back_memory(self._device)
            found = self._error_of([item])
            if found is not None:
                text = f"the {item.kind} could not be encoded: {error_text(found)}"
                self._failures[item.key] = text
                logger.warning("a media item could not be encoded: %s", error_text(found))

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


class MediaCopies:
    """Brings media to a card through pinned memory and on a stream of their own, so that the next
    are copied while the encoder computes. On a CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        new_stream: Any = torch.cuda.Stream
        self._stream = new_stream(device) if device.type == "cuda" else None

    def send(self, items: Sequence[MediaInput]) -> list[MediaInput]:
        """The items with their large tensors on the device, once `wait_for` was called. Where it
        has no memory for them now, the items as they are: the model copies them itself."""
        if self._stream is None:
            return list(items)
        try:
            with torch.cuda.stream(self._stream):
                return [replace(item, tensors=self._sent(item)) for item in items]
        except torch.OutOfMemoryError:
            return list(items)

    def _sent(self, item: MediaInput) -> dict[str, Tensor]:
        return {
            name: tensor.pin_memory().to(self._device, non_blocking=True)
            if tensor.numel() >= LEAST_SENT
            else tensor
            for name, tensor in item.tensors.items()
        }

    def wait_for(self, items: list[MediaInput]) -> list[MediaInput]:
        """The same items; what is computed from now on sees their copies."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in (tensor for item in items for tensor in item.tensors.values()):
                if tensor.is_cuda:
                    tensor.record_stream(current)
        return items


def _batches(items: Sequence[MediaInput], most_values: int) -> Iterator[list[MediaInput]]:
    """Items of one kind, in order, at most `most_values` tensor values in a batch (or one
    item)."""
    batch: list[MediaInput] = []
    num_values = 0
    for item in items:
        size = sum(tensor.numel() for tensor in item.tensors.values())
        is_full = num_values + size > most_values or (batch and batch[0].kind != item.kind)
        if batch and is_full:
            yield batch
            batch, num_values = [], 0
        batch.append(item)
        num_values += size
    if batch:
        yield batch
