"""The image processor of Kosmos-2.5: a page as patches, of which the model makes a fixed number of
tokens.

<s><image> <s> <s> ... <s> </image> <ocr>      <image> in a prompt stands for all up to </image>
           [ latent_query_num ]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mmdeploy_llm_processors.from_transformers import TransformersImages
from mmdeploy_llm_processors.image.special_texts import special_texts

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.media import DecodedImage, ImageHeader
from mmdeploy_llm_plugins.encoder_decoder.patches import check_grid, grid

PATCHES = "flattened_patches"
# The texts of tokens, under their names in tokenizer_config.json.
TOKENS = {
    "bos_token": "<s>",
    "boi_token": "<image>",
    "eoi_token": "</image>",
    "image_token": "<s>",
    "pad_token": "<pad>",
}


class KosmosImages(TransformersImages):
    """transformers' processor, and what its processor of prompts writes for a picture."""

    source = "Kosmos2_5ImageProcessor"
    tensors = (PATCHES,)
    auto_tokens = None  # every image has the same number

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        if options.get("do_normalize") is False:
            raise ConfigError(
                "mm_processor_kwargs: do_normalize must be true, found False: transformers makes "
                "no patches of pixels that are not normalised"
            )
        super().__init__(checkpoint, options)
        texts = special_texts(checkpoint, TOKENS)
        # The tokens of a picture are those that begin a text, so that others mark its places.
        self.token, self.written_token = texts["pad_token"], texts["image_token"]
        self.markers = (texts["boi_token"], texts["bos_token"] + texts["boi_token"])
        self._count_of_all: int = checkpoint.config.latent_query_num
        self._most: int = checkpoint.config.vision_config.max_num_patches
        self._text: str = self.markers[1] + self.token * self._count_of_all + texts["eoi_token"]

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        """Returns the tokens of every picture. Raises MediaError for one with a row or column for
        which the model has no embedding."""
        check_grid(int(made["rows"][0]), int(made["cols"][0]), self._most)
        return self._count_of_all

    def written(self, made: Mapping[str, torch.Tensor]) -> str:
        """Returns the text of an image, with the token that begins a prompt."""
        self.num_tokens(made)
        return self._text

    def shown_size(
        self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Returns (width, height) of the resized image, whose pixels the model counts in boxes."""
        rows, columns = grid(self._fields, item.size)
        patch = self._fields["patch_size"]
        return columns * patch["width"], rows * patch["height"]

    def text(self, size: Any, settings: Mapping[str, Any]) -> str:
        """Returns the text of an image, which is the same for all sizes."""
        return self._text
