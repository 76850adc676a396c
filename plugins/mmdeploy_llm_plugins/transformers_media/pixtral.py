"""Pixtral's image processor for installations without torchvision, which transformers' own needs.

An image is written as its rows of placeholder tokens, each followed by a mark:
[IMG] [IMG] [IMG_BREAK] [IMG] [IMG] [IMG_END].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import ProcessorMixin


class PixtralProcessor(ProcessorMixin):  # type: ignore[misc]
    """Processes images as transformers' class of the same name.

    The arguments are the fields of processor_config.json. patch_size: pixels of a patch of the
    vision tower. spatial_merge_size: patches in each direction that become one embedding.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **_: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.cell_size = patch_size * spatial_merge_size  # pixels of one embedding, each way
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        self.image_break_token = image_break_token
        self.image_end_token = image_end_token

    def _process_images(self, images: Any, **kwargs: Any) -> Any:
        """Resizes images to multiples of an embedding's cell."""
        return super()._process_images(images, **{**kwargs, "patch_size": self.cell_size})

    def replace_image_token(
        self, image_inputs: Mapping[str, Any], image_idx: int, **kwargs: Any
    ) -> str:
        """Returns the rows of one image, each followed by its mark."""
        height, width = (int(edge) for edge in image_inputs["image_sizes"][image_idx])
        row = self.image_token * (width // self.cell_size)
        rows = self.image_break_token.join([row] * (height // self.cell_size))
        return rows + self.image_end_token
