"""EncoderCache: holds encoder outputs by media key. The scheduler decides which are kept and for
how long."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import Model
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.objects.model import cross_of, media_size
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.layers.adapters.attached.served import ServedAdapters
from mmdeploy_llm.layers.attention.cross import by_heads
from mmdeploy_llm.layers.attention.out_of_memory import is_out_of_memory, release_cached_memory
from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.request import MediaInput
from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.system.sharding.peers import NoPeers, Peers
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
MIN_COPIED = 4096  # values: models read smaller tensors on the host, and these copy fast anyway


def values_per_call(device: torch.device) -> int:
    """Returns the upper bound of pixel values in one encoder call. On a CPU larger calls gain no
    speed and need larger buffers; a GPU needs more values to be busy."""
    return (32 if device.type == "cuda" else 8) * 2**20


class EncoderCache:
    """Holds embeddings [num_tokens, media_size] of media that running requests still need, or their
    keys and values, see caches.CrossKV. The runner is its only writer."""

    def __init__(
        self,
        model: Model,
        name: str = "the model",
        device: torch.device = CPU,
        peers: Peers | None = None,
        adapters: ServedAdapters | None = None,
    ) -> None:
        """name: the model in messages. device: where its weights are. peers: the other ranks of the
        model; None: there are none. adapters: those in memory; None: no item has one."""
        self._peers = peers or NoPeers()
        self._model = model
        self._adapters = adapters or ServedAdapters(model, device)
        self._name = name
        self._device = device
        self._copies = MediaCopies(device)
        self._media_size, self._cross = media_size(model), cross_of(model)
        self._embeds: dict[str, Tensor] = {}
        self._failures: dict[str, str] = {}

    def forget(self, keys: Iterable[str]) -> None:
        """Drops the outputs of these keys, which the scheduler no longer keeps."""
        for key in keys:
            self._embeds.pop(key, None)
            self._failures.pop(key, None)

    def encode(self, items: Sequence[MediaInput]) -> None:
        """Encodes all items, several in one call. While a call computes, the next one's media are
        copied to the device. An item that fails is remembered and does not affect the others."""
        batches = [*_batches(items, values_per_call(self._device))]
        following = self._copies.start(batches[0])
        for number, batch in enumerate(batches):
            current = following
            is_last = number + 1 == len(batches)
            following = [] if is_last else self._copies.start(batches[number + 1])
            error = self._error_of(self._copies.wait_for(current))
            del current
            if error is not None:
                self._encode_alone(batch, error)

    def get(self, key: str) -> Tensor | None:
        """Returns the item's embeddings, or None when it could not be encoded."""
        return self._embeds.get(key)

    def needed(self, key: str) -> Tensor:
        """Returns the embeddings of an item that a step needs."""
        embeds = self._embeds.get(key)
        assert embeds is not None, "the runner schedules no item without its media"
        return embeds

    def failure(self, key: str) -> str:
        """Returns why `get` returns None."""
        return self._failures.get(key, "its encoder output is not available")

    def _error_of(self, items: Sequence[MediaInput]) -> BaseException | None:
        """Runs one encoder call. Returns the exception with its traceback dropped, so that its
        tensors are freed, or None."""
        try:
            self._encode(items)
        except FAULTS as error:
            self._peers.raised(error)
            is_known = is_out_of_memory(error)
            logger.debug("an encoder call failed", exc_info=None if is_known else error)
            return error.with_traceback(None)
        return None

    def _encode_alone(self, items: Sequence[MediaInput], error: BaseException) -> None:
        """Encodes the items of a failed call one by one."""
        for item in items:
            if is_out_of_memory(error):
                release_cached_memory(self._device)
            found = self._error_of([item])
            if found is not None:
                text = f"the {item.kind} could not be encoded: {error_text(found)}"
                self._failures[item.key] = text
                logger.warning("a media item could not be encoded: %s", error_text(found))

    def _encode(self, items: Sequence[MediaInput]) -> None:
        given = [item.embeds for item in items if item.embeds is not None]
        if given:  # of all items of the batch
            for item, rows in zip(items, given, strict=True):
                self._embeds[item.key] = to_device(rows, self._device)
            return
        with self._adapters.encoding(items[0].adapter):
            embeds = self._model.encode_media(items)
        if len(embeds) != len(items):
            raise PluginContractError(
                f"encode_media of {self._name} returned {len(embeds)} outputs for {len(items)} "
                "items"
            )
        for item, rows in zip(items, embeds, strict=True):
            shape: tuple[int, ...] = (item.num_tokens, self._media_size)
            if self._cross is not None:
                is_free = not self._cross.has_row_each and rows.dim() > 2
                shape = self._cross.shape(rows.shape[2] if is_free else item.num_tokens)
            if tuple(rows.shape) != shape:
                raise PluginContractError(
                    f"encode_media of {self._name} returned {tuple(rows.shape)} for an item of "
                    f"{item.num_tokens} tokens, must be {shape}"
                )
        for item, rows in zip(items, embeds, strict=True):
            if self._cross is not None and rows.is_cpu:
                self._embeds[item.key] = by_heads(rows)
                continue
            # A copy, so that a small item does not keep the output of the whole call alive.
            self._embeds[item.key] = rows.clone() if len(items) > 1 else rows


class MediaCopies:
    """Copies media to a GPU on a stream of their own, so that the next ones are copied while the
    encoder computes. On a CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        new_stream: Any = torch.cuda.Stream
        self._stream = new_stream(device) if device.type == "cuda" else None

    def start(self, items: Sequence[MediaInput]) -> list[MediaInput]:
        """Returns the items with their large tensors on the device, to be used after `wait_for`.
        When the device is out of memory, returns the items unchanged: the model copies them
        itself."""
        if self._stream is None:
            return list(items)
        try:
            with torch.cuda.stream(self._stream):
                return [replace(item, tensors=self._on_device(item)) for item in items]
        except torch.OutOfMemoryError:
            return list(items)

    def _on_device(self, item: MediaInput) -> dict[str, Tensor]:
        return {
            name: to_device(tensor, self._device) if tensor.numel() >= MIN_COPIED else tensor
            for name, tensor in item.tensors.items()
        }

    def wait_for(self, items: list[MediaInput]) -> list[MediaInput]:
        """Makes the current stream wait for the copies; returns the same items."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in (tensor for item in items for tensor in item.tensors.values()):
                if tensor.is_cuda:
                    tensor.record_stream(current)
        return items


def _batches(items: Sequence[MediaInput], max_values: int) -> Iterator[list[MediaInput]]:
    """Yields the items in order, in groups of one kind and adapter, with at most `max_values`
    tensor values (or one item). Items with embeddings are in groups of their own."""
    batch: list[MediaInput] = []
    num_values = 0
    for item in items:
        size = sum(tensor.numel() for tensor in item.tensors.values())
        if batch and (num_values + size > max_values or _group(batch[0]) != _group(item)):
            yield batch
            batch, num_values = [], 0
        batch.append(item)
        num_values += size
    if batch:
        yield batch


def _group(item: MediaInput) -> tuple[str, bool, str]:
    return item.kind, item.embeds is not None, item.adapter


SHARE = 4  # of the free memory a quarter, at most, for what an encoder has written


def encoder_tokens(runtime: RuntimeConfig, model: Model) -> int:
    """Returns how many tokens of media the encoder cache holds.

    The options are resolved for rows of hidden_size; some models keep wider ones. Where layers
    attend to an encoder, an item is needed as long as its request runs: unless the user has said
    otherwise, there is room for one of each request, within the free memory.
    """
    found = max(1, runtime.encoder_cache_tokens * model.hidden_size // media_size(model))
    cross = cross_of(model)
    if cross is None or cross.longest is None or runtime.options.encoder_cache_memory is not None:
        return found
    bytes_each: int = cross.token_size * getattr(torch, runtime.dtype).itemsize
    fitting = _free(runtime.device) // SHARE // bytes_each
    return max(found, cross.longest, min(fitting, runtime.max_num_seqs * cross.longest))


def _free(device: str) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_ram()
