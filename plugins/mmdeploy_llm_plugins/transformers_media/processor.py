"""Processes images by the checkpoint's own transformers processor, with Pillow (torchvision is not
needed). The prompt text of an image is what that processor writes for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from mmdeploy_llm_processors.from_transformers.lending import Lender
from mmdeploy_llm_processors.from_transformers.levels import BOUNDS, levels_of
from mmdeploy_llm_processors.from_transformers.loading import described, with_fields
from mmdeploy_llm_processors.from_transformers.shapes import shapes_told
from mmdeploy_llm_processors.image.embedded import check_names
from mmdeploy_llm_processors.sized import PictureProcessor, Prepared
from mmdeploy_llm_processors.sized.pictures import check_rows, image_size
from PIL import Image

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import ITEM_NUMBER, Checkpoint, MediaInput

from .processing import (
    image_marker,
    joints,
    load_processor,
    made_of_one,
    marked,
    placeholder_token,
    tokens_around,
)

SIDE = 64  # pixels of an image to try a processor with


def place_of_number(processor: Any) -> int | None:
    """Returns where an image's number is in its text in a prompt, for processors that number
    images; None for others. The first image has the number 0."""
    if getattr(processor, "image_id_start_token", None) is None:
        return None
    images = [np.zeros((SIDE, SIDE, 3), dtype=np.uint8)] * 2
    made = processor(
        images=images,
        text=[processor.image_token * len(images)],
        return_tensors="pt",
        return_text_replacement_offsets=True,
        return_mm_token_type_ids=False,
    )
    first, second = (found["replacement"] for found in made["text_replacement_offsets"][0])
    if first == second:
        return None
    pairs = zip(first, second, strict=False)
    place = next(at for at, (own, other) in enumerate(pairs) if own != other)
    if f"{first[:place]}1{first[place + 1 :]}" != second or first[place] != "0":
        raise UnsupportedMediaError(
            f"transformers' {type(processor).__name__} writes the second image of a prompt as "
            f"{second[:80]!r} and the first as {first[:80]!r}, which is not known here; use a "
            "plugin made for this model"
        )
    return place


GRID = "image_grid_thw"
NEEDS_GRID = (
    "image_embeds of this model need a 'grid': patches in (time, rows, columns) before they are "
    f"merged, as in transformers' {GRID}"
)
PATCH_SIZE = 14  # pixels, of models that do not say
SQUARE = 24  # patches of a side


class AnyImageProcessor(PictureProcessor):
    """A media processor for images of any transformers model.

    checkpoint: its processor files and tokenizer are read. options: the engine's
    mm_processor_kwargs, fields of the image processor that override the checkpoint's. Raises
    UnsupportedMediaError for a model without images, ConfigError for an unknown option and
    CheckpointError for files that transformers cannot use.
    """

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        loaded = load_processor(checkpoint, options)
        super().__init__(checkpoint, {})
        self.given = frozenset(options)
        if BOUNDS & self.given:  # the user's bound is what "auto" stands for
            self.auto_tokens = None
        self.token = placeholder_token(checkpoint.config, loaded)
        self._marker = image_marker(loaded)
        self.markers = (self._marker,)
        self.joints = joints(loaded)
        patch = getattr(getattr(checkpoint.config, "vision_config", None), "patch_size", None)
        patch = patch[0] if isinstance(patch, (list, tuple)) else patch
        self._patch_size = patch if isinstance(patch, int) else PATCH_SIZE
        self._has_grid = GRID in loaded.image_processor.model_input_names
        self._use(loaded)
        with self._lender.lent() as processor:
            self._place_of_number = place_of_number(processor)

    @property
    def identity(self) -> str:
        """Returns the classes of transformers and all fields."""
        return self._identity

    def levels(self, tokens: int, *, may_raise: bool) -> Sequence[PictureProcessor]:
        """See PictureProcessor and levels_of."""
        fields = self._processor.image_processor.to_dict()
        found = levels_of(fields, tokens, self.given, may_raise=may_raise)
        return [self._with(level) for level in found]

    def _with(self, others: Mapping[str, Any]) -> Self:
        """Returns a processor with other options of its images."""
        found = copy.copy(self)
        processor = copy.copy(self._processor)
        processor.image_processor = with_fields(processor.image_processor, others)
        found._use(processor)
        return found

    def _use(self, processor: Any) -> None:
        """Takes a processor of transformers, and forgets what another has made."""

        def another() -> Any:
            """Returns a copy with a tokenizer of its own, which changes when it is called."""
            found = copy.copy(processor)
            found.tokenizer = copy.deepcopy(processor.tokenizer)
            return found

        self._processor, self._texts = processor, {}
        self._fields = processor.image_processor.to_dict()
        self._identity = f"{type(processor).__name__}\0{described(processor.image_processor)}"
        self._lender = Lender(another)

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
        given = options.get("size", (columns * self._patch_size, rows * self._patch_size))
        size = image_size(given)
        text = self.text(size, self.settings)
        check_rows(text.count(self.token), num_tokens, size)
        return MediaInput(
            kind=self.kind,
            tensors={},
            num_tokens=num_tokens,
            key="",
            grid_thw=grid,
            prompt_text=text,
        )

    def prepare(self, content: Image.Image, settings: Mapping[str, Any]) -> Prepared:
        """Returns the arguments of get_image_features, by name, and the image's prompt text."""
        with self._lender.lent() as processor, shapes_told(self._fields, content.size):
            made = processor(
                images=[content],
                text=[marked(processor, self._marker)],
                return_tensors="pt",
                return_text_replacement_offsets=True,
                return_mm_token_type_ids=False,
            )
            text, tensors = made_of_one(processor, made, "an image")
        place = self._place_of_number
        if place is not None:
            text = f"{text[:place]}{ITEM_NUMBER}{text[place + 1 :]}"
        start, end = tokens_around(self._processor)
        grid = tensors.get(GRID)
        return Prepared(
            tensors=tensors,
            text=f"{start}{text}{end}",
            grid=None if grid is None else tuple(grid[0].tolist()),
        )
