"""The pictures of NeoMME: patches of the picture as it is, or made smaller or larger within bounds.
transformers has its processor for torchvision alone; this one does the same on Pillow, which may
round a pixel of a resized picture otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from mmdeploy_llm_processors.image.special_texts import special_texts
from mmdeploy_llm_processors.sized import PictureProcessor, Prepared
from PIL import Image

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint

TOKENS = {"document_token": "<doc>", "image_token": "<img>", "row_token": "<row>"}
HALF = (0.5, 0.5, 0.5)
SWITCHES = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
Size = tuple[int, int]  # height, width


class NeoMMEImages(PictureProcessor):
    """A picture is a document: its rows of patches, a token after each, and two tokens before.
    max_side, min_pixels, max_pixels: its bounds; 0: none. Raises CheckpointError for patches of
    another size than the model's, and for steps left out."""

    token = "<img>"
    is_whole_prompt = True
    auto_tokens = None  # pictures keep their size
    defaults = MappingProxyType({"max_side": 0, "min_pixels": 0, "max_pixels": 0})

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        file = dict(checkpoint.preprocessor)
        own = {"max_side": file.get("max_side"), **(file.get("size") or {})}
        given = {name: value for name, value in own.items() if value}
        super().__init__(checkpoint, {**given, **options})
        self._patch, needed = file.get("patch_size", 32), checkpoint.config.patch_size
        if self._patch != needed:
            raise CheckpointError(
                f"the image processor makes patches of {self._patch} pixels, the model takes "
                f"{needed}"
            )
        if off := [name for name in SWITCHES if not file.get(name, True)]:
            raise CheckpointError(
                f"preprocessor_config.json switches off {', '.join(off)}, which this model's "
                "pictures always have; take the file of the checkpoint's authors"
            )
        self._rescale = float(file.get("rescale_factor", 1 / 255))
        self._mean, self._std = (
            np.array(file.get(name) or HALF, np.float32) for name in ("image_mean", "image_std")
        )
        self._resample = Image.Resampling(file.get("resample", Image.Resampling.BILINEAR))
        found = special_texts(checkpoint, TOKENS)
        self.token, self._begin = found["image_token"], found["document_token"]
        self.markers, self._row = (self.token,), found["row_token"]

    @property
    def identity(self) -> str:
        """Returns what shapes a picture besides its bounds."""
        return f"{self._patch}\0{self._rescale}\0{self._mean}\0{self._std}\0{self._resample}"

    def prepare(self, content: Image.Image, settings: Mapping[str, Any]) -> Prepared:
        """Returns rows of patches, of a picture that is filled with black up to whole ones."""
        size = resized((content.height, content.width), settings)
        if size != (content.height, content.width):
            content = content.resize(size[::-1], self._resample)
        rows, columns = (-(-side // self._patch) for side in size)
        pixels = np.zeros((rows * self._patch, columns * self._patch, 3), np.float32)
        pixels[: size[0], : size[1]] = np.asarray(content)
        pixels = (pixels * self._rescale - self._mean) / self._std
        cells = pixels.reshape(rows, self._patch, columns, self._patch, 3).swapaxes(1, 2)
        grid = (self.token * columns + self._row) * rows
        return Prepared(
            tensors={"pixel_values": cells.reshape(rows * columns, -1).astype(np.float32)},
            text=f"{self._begin}{self.token}{grid}",
            grid=(1, rows, columns),
        )


def resized(size: Size, bounds: Mapping[str, Any]) -> Size:
    """Returns the size of a picture within its bounds, as transformers rounds it: the upper ones
    are kept, the lower one where they allow it."""
    area, longest = math.prod(size), max(size)
    least, most, side = (bounds[name] for name in ("min_pixels", "max_pixels", "max_side"))
    scale = math.sqrt(least / area) if area < least else 1.0
    scale = min(scale, side / longest) if side else scale
    scale = min(scale, math.sqrt(most / area)) if most else scale
    if scale == 1.0:
        return size

    def is_too_large(own: Size) -> bool:
        return bool(side and max(own) > side) or bool(most and math.prod(own) > most)

    found = _scaled(size, scale, round)
    if is_too_large(found):
        height, width = _scaled(size, scale, math.floor)
        if not most or height * width <= most:
            return height, width
        return (
            (max(1, most // width), width) if height >= width else (height, max(1, most // height))
        )
    if area < least and math.prod(found) < least:
        larger = _scaled(size, scale, math.ceil)
        return found if is_too_large(larger) else larger
    return found


def _scaled(size: Size, scale: float, rounded: Any) -> Size:
    height, width = (max(1, rounded(side * scale)) for side in size)
    return height, width
