"""Images through the checkpoint's own processor of transformers, with Pillow (torchvision is not
needed). What stands for an image in the prompt is what that processor writes there."""

from __future__ import annotations

import copy
import json
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from mmdeploy_llm_processors.image.decode import DecodedImage, ImageDecoder, ImageHeader

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits, MediaProcessor

from .processing import load_processor, placeholder_token

# Of a processor's result, what belongs to the text that was given with the image.
OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    | {"text_replacement_offsets"}
)
MAX_SIZES = 4096  # image sizes whose text is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """One image, processed: tensors for the model, and the text that stands for it."""

    tensors: Mapping[str, torch.Tensor]
    text: str


class AnyImageProcessor(MediaProcessor):
    """checkpoint: its processor files and tokenizer are read. options: the engine's
    mm_processor_kwargs, fields of the image processor, which win over the checkpoint's.

    Raises UnsupportedMediaError for a model that takes no images, ConfigError for an unknown
    option and CheckpointError for files that transformers cannot use.
    """

    kind = "image"

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._processor = load_processor(checkpoint, options)
        self.token = placeholder_token(checkpoint.config, self._processor)
        self._marker: str = self._processor.image_token
        self.markers = (self._marker,)
        self._decoder = ImageDecoder()
        self._texts: dict[tuple[int, int], str] = {}  # size -> what stands for such an image
        settings = json.dumps(
            self._processor.image_processor.to_dict(), sort_keys=True, default=str
        )
        self._settings = f"{type(self._processor).__name__}\0{settings}"
        # A fast tokenizer changes its own state when it is called: no two threads may use one.
        # These are copies of `_processor`, which nobody calls.
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def close(self) -> None:
        """Ends the processes that decode."""
        self._decoder.close()

    def max_seconds(self, limits: MediaLimits) -> float:
        """What one call may take before it counts as hanging."""
        return float(self._decoder.max_seconds(limits))

    def decode(self, source: Any, limits: MediaLimits) -> DecodedImage:
        """The upright RGB image behind bytes, a PIL image, a numpy array or a torch tensor."""
        return self._decoder.decode(source, limits)

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """The size of the image, without decoding pixels."""
        return self._decoder.peek(source, limits)

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """What get_image_features takes, under its argument names."""
        _refuse(options)
        made = self._make(item.image)
        grid = made.tensors.get("image_grid_thw")
        return MediaInput(
            kind=self.kind,
            tensors=made.tensors,
            num_tokens=made.text.count(self.token),
            key=blake2b(f"{self._settings}\0{item.digest}".encode(), digest_size=20).hexdigest(),
            grid_thw=None if grid is None else tuple(grid[0].tolist()),
            prompt_text=made.text,
        )

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> int:
        """Placeholder tokens of an image of this size: those of a black one, made once a size."""
        _refuse(options)
        return self._stand_in(item).count(self.token)

    def prompt_text(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> str:
        """`process(item, options).prompt_text`, from the size alone."""
        _refuse(options)
        return self._stand_in(item)

    def _stand_in(self, item: DecodedImage | ImageHeader) -> str:
        """What stands for an image of this size."""
        text = self._texts.get(item.size)
        if text is None:
            width, height = item.size
            text = self._make(np.zeros((height, width, 3), dtype=np.uint8)).text
            if len(self._texts) < MAX_SIZES:
                self._texts[item.size] = text
        return text

    @contextmanager
    def _borrowed(self) -> Iterator[Any]:
        """A processor that nobody else uses meanwhile; a new one when all are in use."""
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
        """image: an RGB image of Pillow, or [height, width, 3] bytes."""
        with self._borrowed() as processor:
            made = processor(
                images=[image],
                text=[self._marker],
                return_tensors="pt",
                return_text_replacement_offsets=True,
                return_mm_token_type_ids=False,
            )
        (replaced,) = made["text_replacement_offsets"][0]
        tensors = {
            name: value
            for name, value in made.items()
            if name not in OF_TEXT and isinstance(value, torch.Tensor)
        }
        return _Made(tensors=tensors, text=replaced["replacement"])


def _refuse(options: Mapping[str, Any]) -> None:
    if options:
        raise MediaError(
            f"an image takes no options of its own, found {', '.join(map(repr, options))}; "
            "give them for all images in mm_processor_kwargs"
        )
