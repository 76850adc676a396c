"""The image processor of Pix2Struct: a picture becomes as many patches of 16 x 16 pixels as its
bound allows, in its own shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mmdeploy_llm_processors.from_transformers import TransformersImages
from mmdeploy_llm_processors.sized import PictureProcessor, Prepared
from PIL import Image

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.encoder_decoder.patches import check_grid, grid

SOURCE = "Pix2StructImageProcessor"
RAISED = 8  # times: how far above the checkpoint's bound a budget raises it
PATCHES, PICTURE = "flattened_patches", "picture"  # names of tensors


class Pix2StructImages(TransformersImages):
    """transformers' processor. Of a checkpoint whose questions
    are drawn above the picture, it returns the picture itself, with as many tokens as it may have
    at most: `prompts` knows the question."""

    source = SOURCE
    token = "<image>"
    markers = ("<image>",)
    tensors = (PATCHES,)
    auto_tokens = None  # the checkpoint's bound is what it was trained with

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        self.is_asked = is_asked(checkpoint)
        others = sorted(set(options) - {"max_patches"})
        if self.is_asked and others:
            raise ConfigError(
                "mm_processor_kwargs: questions are drawn into the pictures of this checkpoint "
                f"(is_vqa), which may set max_patches only, found {', '.join(others)}"
            )
        self._most_patches = getattr(checkpoint.config.vision_config, "seq_len", None)

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the patches."""
        return int(made["attention_mask"][0].sum())

    def prepare(self, content: Image.Image, settings: Mapping[str, Any]) -> Prepared:
        """Returns the patches, each with its row and column before its pixels."""
        if self.is_asked:
            tensors = {PICTURE: np.array(content)}
            return Prepared(tensors=tensors, text=self.text(content.size, settings))
        rows, columns = grid(self._fields, content.size)
        check_grid(rows, columns, self._most_patches)
        return super().prepare(content, settings)

    def text(self, size: tuple[int, int], settings: Mapping[str, Any]) -> str:
        """Returns the text of an image of (width, height)."""
        if self.is_asked:
            return self.token * int(self._fields["max_patches"])
        rows, columns = grid(self._fields, size)
        return self.token * (rows * columns)

    def levels(self, tokens: int, *, may_raise: bool) -> Sequence[PictureProcessor]:
        """Returns the processor whose bound is the budget."""
        most = self._fields["max_patches"]
        if may_raise and "max_patches" not in self.given:
            most = max(most, min(RAISED * most, (self._most_patches or tokens) - 1))
        return [self._with({"max_patches": min(tokens, most)})]


def is_asked(checkpoint: Checkpoint) -> bool:
    """Returns whether questions are drawn above the pictures of a checkpoint."""
    return bool(checkpoint.preprocessor.get("is_vqa"))
