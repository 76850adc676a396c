"""SizedProcessor: a media processor whose items have a text that follows from their size alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaProcessor

from .options import engine_settings, file_settings, item_settings

MAX_SIZES = 4096  # sizes of items whose text is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Holds what a model gets of one item.

    tensors: what its `encode_media` reads, as tensors or arrays.
    text: the item's text in the prompt, with the processor's `token` once for each embedding.
    grid: patches in (time, rows, columns) before they are merged; None for models that need none.
    seconds: length of a sound.
    """

    tensors: Mapping[str, torch.Tensor | np.ndarray]
    text: str
    grid: tuple[int, int, int] | None = None
    seconds: float = 0.0


class SizedProcessor(MediaProcessor):
    """Prepares items by `prepare`; knows their text and number of tokens by their size, which
    headers say. Safe for use from several threads if `prepare` is.

    A subclass sets `kind`, `token` and `markers`, and the abstract methods.

    defaults: options of mm_processor_kwargs with their defaults, whose types the values must have:
        bool, int, float, str, or a tuple of numbers. Their values are `settings`.
    from_file: names of those whose defaults the checkpoint's preprocessor file overrides.
    item_options: names of those that one prompt or item may set.
    bounds: names of those that bound the tokens: an item's may not be above the engine's.
    """

    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    from_file: ClassVar[tuple[str, ...]] = ()
    item_options: ClassVar[tuple[str, ...]] = ()
    bounds: ClassVar[tuple[str, ...]] = ()

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self.checkpoint = checkpoint
        is_video = self.kind == "video"
        file = checkpoint.video_preprocessor if is_video else checkpoint.preprocessor
        defaults = file_settings(self.defaults, file, self.from_file)
        self.settings: Mapping[str, Any] = engine_settings(self.kind, defaults, options)
        # Names may begin with the kind; so may those of options themselves (image_mean).
        self.given = frozenset(options) | {name.removeprefix(f"{self.kind}_") for name in options}
        self._texts: dict[tuple[Hashable, str], str] = {}

    @abstractmethod
    def prepare(self, content: Any, settings: Mapping[str, Any]) -> Prepared:
        """Returns what the model gets of an item with this content, such as an RGB image.

        settings: the engine's, with the item's own. The text may depend on the content's size and
        the settings only. Raises MediaError for content that the model cannot take.
        """

    @abstractmethod
    def content_of(self, item: Any, settings: Mapping[str, Any]) -> Any:
        """Returns the content of a decoded item, which has a `digest`."""

    @abstractmethod
    def size_of(self, content: Any) -> Hashable:
        """Returns the size of a content."""

    @abstractmethod
    def blank(self, size: Any) -> Any:
        """Returns a content of this size, whatever is in it."""

    @property
    def identity(self) -> str:
        """Returns what shapes an item beside content and settings, for its key; "" by default."""
        return ""

    def text(self, size: Any, settings: Mapping[str, Any]) -> str:
        """Returns the text of an item of this size: what `prepare` writes for a blank one, which is
        kept. A subclass that can tell it from the size alone overrides this."""
        key = size, repr(settings)
        found = self._texts.get(key)
        if found is None:
            found = self.prepare(self.blank(size), settings).text
            if len(self._texts) < MAX_SIZES:
                self._texts[key] = found
        return found

    def too_small(self, size: Any) -> MediaError:
        """Returns the error for an item of a size that has no token."""
        return MediaError(f"the {self.kind} is too small for this model: {size} has no token")

    def own_settings(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the settings of one item. Raises MediaError for wrong options."""
        return item_settings(self.kind, self.settings, options, self.item_options, self.bounds)

    def process(self, item: Any, options: Mapping[str, Any]) -> MediaInput:
        """Returns what `prepare` makes of the item. key: hash of all that it depends on."""
        settings = self.own_settings(options)
        made = self.processed(self.content_of(item, settings), item.digest, settings)
        notes = self._notes_of(item)
        return replace(made, notes=notes) if notes else made

    def _notes_of(self, item: Any) -> tuple[str, ...]:
        """Returns what a user should know of an item whose content was read; () by default."""
        return ()

    def processed(self, content: Any, digest: str, settings: Mapping[str, Any]) -> MediaInput:
        """Returns what `process` does. digest: of the item as it was given, before a budget has
        shrunk it."""
        made, size = self.prepare(content, settings), self.size_of(content)
        kind = type(self)
        text = (
            f"{kind.__module__}.{kind.__qualname__}\0{self.identity}\0{sorted(settings.items())!r}"
            f"\0{digest}\0{size}"
        )
        return MediaInput(
            kind=self.kind,
            tensors={name: _tensor(value) for name, value in made.tensors.items()},
            num_tokens=self._count(made.text, size),
            key=blake2b(text.encode(), digest_size=20).hexdigest(),
            grid_thw=made.grid,
            prompt_text=made.text,
            seconds=made.seconds,
        )

    def count_tokens(self, item: Any, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of an item of this size."""
        settings = self.own_settings(options)
        size = self._size(item, settings)
        return self._count(self.text(size, settings), size)

    def prompt_text(self, item: Any, options: Mapping[str, Any]) -> str:
        """Returns `process(item, options).prompt_text`, from the size alone."""
        settings = self.own_settings(options)
        return self.text(self._size(item, settings), settings)

    def _size(self, item: Any, settings: Mapping[str, Any]) -> Any:
        return self.size_of(self.content_of(item, settings))

    def _count(self, text: str, size: Any) -> int:
        count = text.count(self.token)
        if not count:
            raise self.too_small(size)
        return count


def _tensor(value: torch.Tensor | np.ndarray) -> torch.Tensor:
    found = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
    return found.contiguous()
