"""TransformersImages: image processors on those of transformers."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from PIL import Image

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_processors.sized import PictureProcessor, Prepared

from .lending import Lender
from .levels import BOUNDS, levels_of
from .loading import described, load_image_processor, with_fields
from .shapes import shapes_told, without_margin


class TransformersImages(PictureProcessor):
    """Prepares images by an image processor of transformers, on Pillow alone. A family sets `token`
    and `markers`, names the tensors, and says by `written` or `num_tokens` what text an image has.
    Safe for use from several threads.

    source: the name of transformers' class; None: what the checkpoint names.
    tensors: those of its results that the family's `encode_media` reads.
    grid: the name of the result that holds the grid of patches; None: there is none.
    fields: values of its fields that differ from the checkpoint's.
    item_options: names of fields that one prompt or image may set.
    The user's mm_processor_kwargs are fields too. Raises as load_image_processor.
    """

    source: ClassVar[str | None] = None
    tensors: ClassVar[tuple[str, ...]] = ("pixel_values",)
    grid: ClassVar[str | None] = None
    fields: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        loaded = load_image_processor(checkpoint, self.source, options, fields=self.fields)
        super().__init__(checkpoint, {})
        self.given = frozenset(options)
        if BOUNDS & self.given:  # the user's bound is what "auto" stands for
            self.auto_tokens = None
        self._use(loaded)

    @abstractmethod
    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the number of embeddings that the family's encoder makes of these results, which
        may depend on their shapes and the grid only."""

    def written(self, made: Mapping[str, torch.Tensor]) -> str:
        """Returns the text of an image with these results; by default its tokens alone."""
        return self.token * self.num_tokens(made)

    @property
    def identity(self) -> str:
        """Returns the class of transformers and all its fields."""
        return self._identity

    def prepare(self, content: Image.Image, settings: Mapping[str, Any]) -> Prepared:
        """Returns what transformers makes of the image. Raises MediaError, see shapes_told."""
        size, own = without_margin(content, {**self._fields, **settings})
        with self._lender.lent() as processor, shapes_told(self._fields, size):
            made = processor(images=[content], return_tensors="pt", **{**settings, **own})
        grid = None if self.grid is None else tuple(made[self.grid][0].tolist())
        return Prepared(
            tensors={name: made[name] for name in self.tensors},
            text=self.written(made),
            grid=grid,
        )

    def levels(self, tokens: int, *, may_raise: bool) -> Sequence[PictureProcessor]:
        """Returns processors with lower bounds, for the fields that transformers' classes have."""
        found = levels_of(self._fields, tokens, self.given, may_raise=may_raise)
        return [self._with(level) for level in found]

    def _with(self, others: Mapping[str, Any]) -> Self:
        found = copy.copy(self)
        found._use(with_fields(self._processor, others))
        return found

    def _use(self, processor: Any) -> None:
        """Takes a processor of transformers, and forgets what another has made."""
        self._processor, self._fields = processor, processor.to_dict()
        self._identity, self._texts = described(processor), {}
        self._lender = Lender(lambda: copy.deepcopy(processor))
        self.settings = {name: self._fields[name] for name in self.item_options}
