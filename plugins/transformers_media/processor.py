"""Processes images by the checkpoint's own transformers processor, with Pillow (torchvision is not
needed). The prompt text of an image is what that processor writes for it."""

from __future__ import annotations

import copy
import json
import operator
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self

import torch
from mmdeploy_llm_processors.image.budget import AUTO_TOKENS
from mmdeploy_llm_processors.image.embedded import check_names
from PIL import Image

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import ITEM_NUMBER, Checkpoint, MediaInput, MediaLimits, MediaProcessor
from mmdeploy_llm.media import DecodedImage, ImageDecoder, ImageHeader

from .budget import BOUNDS, BoundedImageProcessor, levels_of
from .numbering import place_of_number
from .processing import (
    image_marker,
    load_processor,
    marked,
    placeholder_token,
    tokens_around,
)

# Keys of a processor's result that belong to the text given with the image.
OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    | {"text_replacement_offsets"}
)
GRID = "image_grid_thw"
NEEDS_GRID = (
    "image_embeds of this model need a 'grid': patches in (time, rows, columns) before they are "
    f"merged, as in transformers' {GRID}"
)
PATCH_SIZE = 14  # pixels, of models that do not say
SQUARE = 24  # patches of a side
MAX_SIDE = 2**16  # pixels
MAX_SIZES = 4096  # image sizes whose prompt text is cached


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A processed image: tensors for the model, and its text in the prompt."""

    tensors: Mapping[str, torch.Tensor]
    text: str


class AnyImageProcessor(MediaProcessor):
    """A media processor for images of any transformers model.

    checkpoint: its processor files and tokenizer are read. options: the engine's
    mm_processor_kwargs, fields of the image processor that override the checkpoint's. Raises
    UnsupportedMediaError for a model without images, ConfigError for an unknown option and
    CheckpointError for files that transformers cannot use.
    """

    kind = "image"
    auto_tokens: int | None = AUTO_TOKENS

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._given = frozenset(options)
        if BOUNDS & self._given:  # the user's bound is what "auto" stands for
            self.auto_tokens = None
        self._processor = load_processor(checkpoint, options)
        self.token = placeholder_token(checkpoint.config, self._processor)
        self._marker = image_marker(self._processor)
        self.markers = (self._marker,)
        patch = getattr(getattr(checkpoint.config, "vision_config", None), "patch_size", None)
        patch = patch[0] if isinstance(patch, (list, tuple)) else patch
        self._patch_size = patch if isinstance(patch, int) else PATCH_SIZE
        self._has_grid = GRID in self._processor.image_processor.model_input_names
        self._decoder = ImageDecoder()
        self._use(self._processor)
        with self._borrowed() as processor:
            self._place_of_number = place_of_number(processor)

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> BoundedImageProcessor:
        """See MediaProcessor and budget.py."""
        fields = self._processor.image_processor.to_dict()
        levels = levels_of(fields, tokens, self._given, may_raise=may_raise)
        return BoundedImageProcessor([self._with(fields, level) for level in levels], tokens)

    def _with(self, fields: Mapping[str, Any], others: Mapping[str, Any]) -> Self:
        """Returns a processor with other options of its images."""
        found = copy.copy(self)
        processor = copy.copy(self._processor)
        kind = type(processor.image_processor)
        processor.image_processor = kind.from_dict({**fields, **others})
        found._use(processor)
        return found

    def _use(self, processor: Any) -> None:
        """Takes a processor of transformers, and forgets what another has made."""
        self._processor = processor
        self._texts: dict[tuple[int, int], str] = {}  # size -> prompt text of such an image
        settings = json.dumps(processor.image_processor.to_dict(), sort_keys=True, default=str)
        self._settings = f"{type(processor).__name__}\0{settings}"
        # A fast tokenizer changes its own state when it is called, so no two threads may share one:
        # each call borrows a copy of `_processor`, which is itself never called.
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def close(self) -> None:
        """Ends the decoder processes."""
        self._decoder.close()

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        return float(self._decoder.max_seconds(limits))

    def decode(self, source: Any, limits: MediaLimits) -> DecodedImage:
        """Decodes bytes, a PIL image, a numpy array or a torch tensor to an upright RGB image."""
        return self._decoder.decode(source, limits)

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """Reads the size of the image without decoding pixels."""
        return self._decoder.peek(source, limits)

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """Returns the arguments of get_image_features, by name, and the image's prompt text."""
        return self.processed(item.image, item.digest, options)

    def processed(self, image: Any, digest: str, options: Mapping[str, Any]) -> MediaInput:
        """Returns what `process` does for an RGB image of Pillow. digest: of the image as it
        was given, before a budget has shrunk it."""
        _refuse(options)
        made = self._make(image)
        grid = made.tensors.get(GRID)
        text = f"{self._settings}\0{digest}\0{getattr(image, 'size', None)}"
        return MediaInput(
            kind=self.kind,
            tensors=made.tensors,
            num_tokens=made.text.count(self.token),
            key=blake2b(text.encode(), digest_size=20).hexdigest(),
            grid_thw=None if grid is None else tuple(grid[0].tolist()),
            prompt_text=made.text,
        )

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of an image of this size."""
        _refuse(options)
        return self._text_of(item).count(self.token)

    def prompt_text(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> str:
        """Returns `process(item, options).prompt_text`, from the size alone."""
        _refuse(options)
        return self._text_of(item)

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. The prompt text is that of an image of the same size: `size` of the
        options, (width, height) in pixels, else that of the grid, else a square one, since most
        such models write every image alike.

        Raises MediaError when that text has not num_tokens placeholders.
        """
        check_names(self.kind, options, "size")
        if grid is None and self._has_grid:
            raise MediaError(NEEDS_GRID)
        _, rows, columns = grid or (1, SQUARE, SQUARE)
        size = _size(options.get("size", (columns * self._patch_size, rows * self._patch_size)))
        text = self._text_of(ImageHeader(size=size))
        if text.count(self.token) != num_tokens:
            raise MediaError(
                f"image_embeds has {num_tokens} rows, but an image of {size[0]} x {size[1]} pixels "
                f"has {text.count(self.token)} tokens in this model; give the image's own 'size', "
                "(width, height)"
            )
        return MediaInput(
            kind=self.kind,
            tensors={},
            num_tokens=num_tokens,
            key="",
            grid_thw=grid,
            prompt_text=text,
        )

    def _text_of(self, item: DecodedImage | ImageHeader) -> str:
        """Returns the prompt text of an image of this size: that of a black one, cached by size."""
        text = self._texts.get(item.size)
        if text is None:
            # Not an array, whose channels transformers seeks elsewhere in an image 3 pixels high.
            text = self._make(Image.new("RGB", item.size)).text
            if len(self._texts) < MAX_SIZES:
                self._texts[item.size] = text
        return text

    @contextmanager
    def _borrowed(self) -> Iterator[Any]:
        """Lends a processor to one thread; makes a new one when all are in use."""
        try:
            processor = self._free.get_nowait()
        except queue.Empty:
            processor = copy.copy(self._processor)
            processor.tokenizer = copy.deepcopy(self._processor.tokenizer)
        try:
            yield processor
        finally:
            self._free.put(processor)

    def _make(self, image: Any) -> _Made:
        """Processes one image. image: an RGB image of Pillow."""
        with self._borrowed() as processor:
            made = processor(
                images=[image],
                text=[marked(processor, self._marker)],
                return_tensors="pt",
                return_text_replacement_offsets=True,
                return_mm_token_type_ids=False,
            )
            written = made.get("text_replacement_offsets") or processor.written
            processor.written = ()
        if not written:
            raise MediaError(
                f"transformers' {type(self._processor).__name__} does not say how it writes an "
                "image in a prompt; use a plugin made for this model"
            )
        (replaced,) = written[0]
        tensors = {
            name: value
            for name, value in made.items()
            if name not in OF_TEXT and isinstance(value, torch.Tensor)
        }
        text, place = replaced["replacement"], self._place_of_number
        if place is not None:
            text = f"{text[:place]}{ITEM_NUMBER}{text[place + 1 :]}"
        start, end = tokens_around(self._processor)
        return _Made(tensors=tensors, text=f"{start}{text}{end}")


def _size(given: Any) -> tuple[int, int]:
    """Returns (width, height). Raises MediaError for anything but two bounded whole numbers."""
    try:
        width, height = map(operator.index, given)
    except (TypeError, ValueError):
        width = height = 0
    if not 0 < min(width, height) <= max(width, height) <= MAX_SIDE:
        raise MediaError(
            f"'size' of image_embeds must be (width, height) in pixels, at most {MAX_SIDE}, got "
            f"{given!r:.80}"
        )
    return width, height


def _refuse(options: Mapping[str, Any]) -> None:
    if options:
        raise MediaError(
            f"an image of this model takes no options of its own, found "
            f"{', '.join(map(repr, options))}; give them for all images in "
            "LLM(mm_processor_kwargs=...)"
        )
