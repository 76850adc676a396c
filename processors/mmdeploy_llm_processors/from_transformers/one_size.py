"""OneSizeImages: images that a tower reads in one size, whatever theirs is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from mmdeploy_llm.errors import CheckpointError, MediaError
from mmdeploy_llm.hooks import Checkpoint

from .images import TransformersImages


class OneSizeImages(TransformersImages):
    """Images that become `pixel_values` of one size, so that all have the same text. Raises
    CheckpointError where the size is not the tower's, and MediaError for an image of which
    the processor makes another, such as one that it does not resize."""

    auto_tokens = None

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        self._shape, self._num_tokens = self.of_tower(checkpoint.config)
        height, width = self._shape
        try:
            self._text = self.prepare(self.blank((width, height)), self.settings).text
        except MediaError as error:
            raise CheckpointError(
                f"{error}; check preprocessor_config.json and mm_processor_kwargs"
            ) from None

    @abstractmethod
    def of_tower(self, config: Any) -> tuple[tuple[int, int], int]:
        """Returns the (height, width) in pixels of what the tower reads, and how many tokens the
        model has for it."""

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the tokens of every image."""
        found = tuple(made["pixel_values"].shape[-2:])
        if found != self._shape:
            (height, width), (rows, columns) = found, self._shape
            raise MediaError(
                f"the image processor makes an image of {width} x {height} pixels, but the tower "
                f"reads {columns} x {rows}"
            )
        return self._num_tokens

    def text(self, size: Any, settings: Mapping[str, Any]) -> str:
        """Returns the text of an image, which is the same for all sizes."""
        return self._text
