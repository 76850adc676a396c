"""Fakes: a minimal model, parser and processor that keep their contracts, and a manager of chosen
plugins, for tests that need the engine but no weights.

    FAKE = ModelSpec(name="fake", architectures=("AcmeForCausalLM",), priority=100,
                     factory="mmdeploy_llm.testing.fakes:FakeModel", media=("image",))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import MediaError, MediaLimitError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import (
    Checkpoint,
    MediaInput,
    MediaLimits,
    MediaProcessor,
    MediaProcessorSpec,
    MediaSpan,
    ModelSpec,
    PluginManager,
    ReasoningParser,
    ReasoningParserSpec,
    Segment,
    hookimpl,
)

HIDDEN_SIZE = 8
FAKE_SOURCE = re.compile(rb"FAKE (\d+)x(\d+) (.*)", re.DOTALL)
PIXELS_PER_TOKEN = 16


class FakeModel(nn.Module):
    """A model whose next token is always the last one + 1. It reads no weights of a checkpoint,
    and uses the attention cache as any model does."""

    num_layers = 1
    num_kv_heads = 1
    head_dim = HIDDEN_SIZE
    hidden_size = HIDDEN_SIZE

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vocab_size = int(config.get_text_config().vocab_size)

    def weight_targets(self, key: str) -> tuple[()]:
        """Returns (): no key of the checkpoint is needed."""
        return ()

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns [T, hidden] with the token's id in every channel."""
        hidden = inputs.token_ids[:, None].float().repeat(1, self.hidden_size)
        heads = torch.zeros_like(hidden)[:, None]
        attended = inputs.attn.attend(0, heads, heads, heads)
        return inputs.merge_media(hidden + attended[:, 0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns [N, vocab]: 5 for the next id, 0 for all others."""
        following = (hidden[:, 0].long() + 1) % self.vocab_size
        return 5.0 * nn.functional.one_hot(following, self.vocab_size).float()

    def encode_media(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Returns embeddings of ones."""
        return [torch.ones(item.num_tokens, self.hidden_size) for item in items]

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> None:
        """Returns None: token i has position i."""
        return None


class FakeReasoningParser(ReasoningParser):
    """Splits a text at the first </think> into reasoning and content; without one, all of the text
    is content, or reasoning where the prompt ends with <think>."""

    markers = ("</think>",)
    start_marker = "<think>"
    end_marker = "</think>"

    def __init__(self) -> None:
        self._held = ""
        self._is_over = False
        self._is_opened = False

    def start(self, prompt: str) -> None:
        """Expects only content after a prompt that has closed the reasoning."""
        self._is_over = prompt.rstrip().endswith("</think>")
        self._is_opened = prompt.rstrip().endswith("<think>")

    def feed(self, text: str) -> list[Segment]:
        """Holds the text back until the marker; returns content after it at once."""
        if self._is_over:
            return _segments("", text)
        self._held += text
        reasoning, mark, content = self._held.partition("</think>")
        if not mark:
            return []
        self._held, self._is_over = "", True
        return _segments(reasoning, content)

    def finish(self) -> list[Segment]:
        """Returns the text held back."""
        return _segments(self._held, "") if self._is_opened else _segments("", self._held)


class FakeMediaProcessor(MediaProcessor):
    """Processes images of the form b"FAKE 12x8 any bytes": width, height and content. Each
    PIXELS_PER_TOKEN pixels become one token."""

    kind = "image"
    token = "<|image_pad|>"
    markers = ("<|image_pad|>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def decode(self, source: Any, limits: MediaLimits) -> tuple[int, bytes]:
        """Returns (number of pixels, bytes). Raises MediaError, MediaLimitError."""
        if isinstance(source, bytes) and len(source) > limits.max_bytes:
            raise MediaLimitError(
                f"the fake image has {len(source)} bytes, {limits.max_bytes} are allowed"
            )
        found = FAKE_SOURCE.fullmatch(source) if isinstance(source, bytes) else None
        if found is None or max(len(found[1]), len(found[2])) > 6:
            raise MediaError('a fake image must look like b"FAKE 12x8 any bytes"')
        num_pixels = int(found[1]) * int(found[2])
        if num_pixels > limits.max_pixels:
            raise MediaLimitError(
                f"the fake image has {num_pixels} pixels, {limits.max_pixels} are allowed"
            )
        return num_pixels, bytes(source)

    def process(self, item: tuple[int, bytes], options: Mapping[str, Any]) -> MediaInput:
        """Returns the tensor `bytes`, uint8 [num_bytes]."""
        key = blake2b(repr((self._options, dict(options))).encode() + item[1]).hexdigest()
        return MediaInput(
            kind=self.kind,
            tensors={"bytes": torch.tensor(list(item[1]), dtype=torch.uint8)},
            num_tokens=self.count_tokens(item, options),
            key=key,
        )

    def count_tokens(self, item: tuple[int, bytes], options: Mapping[str, Any]) -> int:
        """Returns the number of tokens, at least one."""
        return max(1, item[0] // PIXELS_PER_TOKEN)


def fake_manager(
    *plugins: object,
    models: Iterable[ModelSpec] = (),
    reasoning_parsers: Iterable[ReasoningParserSpec] = (),
    media_processors: Iterable[MediaProcessorSpec] = (),
) -> PluginManager:
    """Returns a manager with these plugins (modules or objects with hooks) and specs, and no
    installed plugin. Raises PluginLoadError as `PluginManager.register` does."""
    manager = PluginManager()
    for number, plugin in enumerate(plugins):
        manager.register(plugin, getattr(plugin, "__name__", f"plugin {number}"))
    specs = _Specs(tuple(models), tuple(reasoning_parsers), tuple(media_processors))
    manager.register(specs, "given specs")
    return manager


class _Specs:
    """A plugin that provides the given specs."""

    def __init__(
        self,
        models: tuple[ModelSpec, ...],
        parsers: tuple[ReasoningParserSpec, ...],
        processors: tuple[MediaProcessorSpec, ...],
    ) -> None:
        self._models, self._parsers, self._processors = models, parsers, processors

    @hookimpl
    def provide_models(self) -> tuple[ModelSpec, ...]:
        return self._models

    @hookimpl
    def provide_reasoning_parsers(self) -> tuple[ReasoningParserSpec, ...]:
        return self._parsers

    @hookimpl
    def provide_media_processors(self) -> tuple[MediaProcessorSpec, ...]:
        return self._processors


def _segments(reasoning: str, content: str) -> list[Segment]:
    pairs = ((Segment(kind="reasoning", text=reasoning)), (Segment(kind="content", text=content)))
    return [segment for segment in pairs if segment.text]
