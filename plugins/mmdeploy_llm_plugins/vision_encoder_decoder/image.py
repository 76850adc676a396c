"""The image processor that a checkpoint names, with the size that its tower reads."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm_processors.from_transformers import OneSizeImages

from mmdeploy_llm.errors import ModelNotSupportedError

EXTRA = {"vit": 1, "deit": 2, "donut-swin": 0}  # tokens beside the patches


def sides(value: Any) -> tuple[int, int]:
    """Returns height and width, where a config may say one number for both."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def num_cells(tower: Any) -> int:
    """Returns the length of a tower's output, by its config. Raises ModelNotSupportedError for a
    tower of another family."""
    if tower.model_type not in EXTRA:
        raise ModelNotSupportedError(
            f"towers of {', '.join(EXTRA)} are supported, found {tower.model_type!r:.40}"
        )
    height, width = sides(tower.image_size)
    rows, columns = sides(tower.patch_size)
    merged = 2 ** (len(tower.depths) - 1) if tower.model_type == "donut-swin" else 1
    cells = 1
    for side, patch in ((height, rows), (width, columns)):
        count = -(-side // patch)
        for _ in range(merged.bit_length() - 1):
            count = -(-count // 2)
        cells *= count
    return cells + EXTRA[tower.model_type]


class EncoderImages(OneSizeImages):
    """transformers' processor, with the size that the tower has positions for."""

    token = "<image>"
    markers = ("<image>",)

    def of_tower(self, config: Any) -> tuple[tuple[int, int], int]:
        """Returns the tower's size, and the length of its output."""
        return sides(config.encoder.image_size), num_cells(config.encoder)
