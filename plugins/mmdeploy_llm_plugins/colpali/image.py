"""The image processors. An image is a whole prompt: its tokens with the words of the training
around them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from mmdeploy_llm_processors.from_transformers import OneSizeImages, TransformersImages
from mmdeploy_llm_processors.image.special_texts import special_texts
from mmdeploy_llm_processors.sized import Prepared
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import MAX_IMAGE_SIZE
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    _resize_output_size_rescale_to_max_len as resized_sides,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    _resize_output_size_scale_below_upper_bound as bounded_sides,
)

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint, MediaInput
from mmdeploy_llm_plugins.qwen.image import QwenImageProcessor

IMAGE = "<image>"
PALI = f"{IMAGE}<bos>Describe the image.\n"
QWEN = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>"
    "<|endoftext|>"
)
MODERN = f"<|begin_of_text|>User:{IMAGE}Describe the image.<end_of_utterance>\nAssistant:"
ENDS = {"cls_token": "[CLS]", "sep_token": "[SEP]"}  # around each text of the tokenizer
# What UltraVBert's class has where preprocessor_config.json says nothing.
ULTRA_FIELDS = {
    "size": {"longest_edge": 3072},
    "max_image_size": {"longest_edge": 512},
    "max_image_tiles": 27,
}
FAKE = "<fake_token_around_image>"


def words(checkpoint: Checkpoint, default: str, token: str) -> str:
    """Returns the prompt of an image, with one token for it, as processor_config.json or else the
    training has it. Raises CheckpointError for one without the token."""
    found = checkpoint.read_json("processor_config.json").get("visual_prompt_prefix") or default
    if not isinstance(found, str) or found.count(token) != 1:
        raise CheckpointError(
            f"visual_prompt_prefix of processor_config.json is {found!r:.100}; it must be a text "
            f"with {token} once"
        )
    return found


class PaliImages(OneSizeImages):
    """ColPali's images of one size, whose patches are a token each."""

    token = IMAGE
    markers = (IMAGE,)
    is_whole_prompt = True

    def of_tower(self, config: Any) -> tuple[tuple[int, int], int]:
        """Returns the tower's square, and its patches."""
        vision = config.vlm_config.vision_config
        side: int = vision.image_size
        return (side, side), (side // vision.patch_size) ** 2

    def written(self, made: Mapping[str, torch.Tensor]) -> str:
        """Returns the tokens and the words after them."""
        return PALI.replace(IMAGE, IMAGE * self.num_tokens(made))


class QwenImages(QwenImageProcessor):
    """ColQwen2's images of any size."""

    is_whole_prompt = True

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        self._words = words(checkpoint, QWEN, self.token)

    def process(self, item: Any, options: Mapping[str, Any]) -> MediaInput:
        """See MediaProcessor."""
        made = super().process(item, options)
        return replace(made, prompt_text=self._written(made.num_tokens))

    def prompt_text(self, item: Any, options: Mapping[str, Any]) -> str:
        """See MediaProcessor."""
        return self._written(self.count_tokens(item, options))

    def _written(self, num_tokens: int) -> str:
        return self._words.replace(self.token, self.token * num_tokens)


class TiledImages(TransformersImages):
    """Images as tiles of one size and the whole image, small."""

    token = IMAGE
    markers = (IMAGE,)
    auto_tokens = None

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        config = getattr(checkpoint.config, "vlm_config", checkpoint.config)
        vision = config.vision_config
        side = vision.image_size // vision.patch_size // config.pixel_shuffle_factor
        self._tokens_of_tile = int(side) ** 2

    def prepare(self, content: Image.Image, settings: Mapping[str, Any]) -> Prepared:
        """Returns the tiles, and the text that says which is which."""
        return super().prepare(content, {**settings, "return_row_col_info": True})

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the tokens of all tiles."""
        return int(made["pixel_values"].shape[1]) * self._tokens_of_tile

    def written(self, made: Mapping[str, Any]) -> str:
        """Returns the text of transformers' processor, which names row and column of each tile."""
        rows, columns = (int(made[name][0][0]) for name in ("rows", "cols"))
        tile, text = IMAGE * self._tokens_of_tile, ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{FAKE}<row_{row}_col_{column}>{tile}"
            text += "\n"
        return text + ("\n" if rows else "") + f"{FAKE}<global-img>{tile}{FAKE}"


class ModernImages(TiledImages):
    """ColModernVBert's images, with the words of the training around them."""

    is_whole_prompt = True

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        ends = special_texts(checkpoint, ENDS)
        own = words(checkpoint, MODERN, self.token)
        self._words = ends["cls_token"] + own + ends["sep_token"]

    def written(self, made: Mapping[str, Any]) -> str:
        """See TiledImages."""
        return self._words.replace(IMAGE, super().written(made))


class UltraImages(TiledImages):
    """UltraVBert's images, made smaller until they have no more than max_image_tiles tiles.
    transformers has its processor for torchvision alone, which differs from that of Idefics 3 by
    this only."""

    source = "Idefics3ImageProcessor"

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        fields = {**ULTRA_FIELDS, **checkpoint.preprocessor}
        self._most = int(fields.pop("max_image_tiles"))
        super().__init__(replace(checkpoint, preprocessor=fields), options)

    def prepare(self, content: Image.Image, settings: Mapping[str, Any]) -> Prepared:
        """See TiledImages."""
        given = {**self._fields, **settings}
        if not given["do_image_splitting"]:
            return super().prepare(content, settings)
        longest, tile = (given[name]["longest_edge"] for name in ("size", "max_image_size"))
        while longest > tile and num_tiles(content.size, longest, tile) > self._most:
            longest -= tile
        return super().prepare(content, {**settings, "size": {"longest_edge": longest}})


def num_tiles(size: tuple[int, int], longest: int, tile: int) -> int:
    """Returns the tiles of an image of (width, height) that is resized to this longest edge, as
    transformers rounds them."""
    width, height = size
    sides = resized_sides(height, width, max_len=longest)
    height, width = bounded_sides(*sides, max_len=MAX_IMAGE_SIZE)
    along = math.ceil(max(height, width) / tile)
    aspect = width / height
    across = int(along * tile / aspect) if width >= height else int(along * tile * aspect)
    found: int = along * math.ceil(across / tile)
    return found
