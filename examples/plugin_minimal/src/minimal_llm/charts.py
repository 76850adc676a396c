"""The media processor: draws rows of a label and a number as a bar chart for CLIP."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits, MediaProcessor
from PIL import Image, ImageDraw

MAX_BARS = 64
COLOURS = {"blue": (40, 90, 200), "green": (40, 140, 60), "red": (200, 50, 40)}
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The values of a chart, a number of 0 or more for each label."""

    labels: tuple[str, ...]
    values: tuple[float, ...]

    @property
    def digest(self) -> str:
        """Hash of the content; a chart that was processed before is not drawn again."""
        return blake2b(repr((self.labels, self.values)).encode(), digest_size=20).hexdigest()


class ChartProcessor(MediaProcessor):
    """Draws charts at the input size of the vision tower, with one token for each patch.

    An item may set the option `colour` of its bars: {"type": "chart", "chart": rows, "colour":
    "red"} in a chat.
    """

    kind = "chart"
    token = "<image>"  # LLaVA's own placeholder
    markers = ("<chart>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        vision = checkpoint.config.vision_config
        self._size, self._patch_size = vision.image_size, vision.patch_size
        self._mean = np.array(checkpoint.preprocessor.get("image_mean", CLIP_MEAN), np.float32)
        self._std = np.array(checkpoint.preprocessor.get("image_std", CLIP_STD), np.float32)

    def decode(self, source: Any, limits: MediaLimits) -> Chart:
        """Reads a chart from the bytes of a CSV file or a list of (label, number) pairs."""
        if isinstance(source, bytes):
            if len(source) > limits.max_bytes:
                raise MediaLimitError(
                    f"the chart has {len(source)} bytes, {limits.max_bytes} are allowed; shrink it"
                )
            source = _rows(source)
        if not isinstance(source, list | tuple):
            raise UnsupportedMediaError(
                f"a chart is a CSV file or a list of (label, number), got {type(source).__name__}"
            )
        if len(source) > MAX_BARS:
            raise MediaLimitError(f"the chart has {len(source)} bars, {MAX_BARS} are allowed")
        return _chart(source)

    def process(self, item: Chart, options: Mapping[str, Any]) -> MediaInput:
        """Returns `pixels` float32 [3, size, size], normalised as for CLIP."""
        colour = _colour(options)
        pixels = np.asarray(draw(item, self._size, colour), dtype=np.float32) / 255
        pixels = ((pixels - self._mean) / self._std).transpose(2, 0, 1)
        identity = repr((self._size, self._mean, self._std, colour, item.digest))
        return MediaInput(
            kind=self.kind,
            tensors={"pixels": torch.from_numpy(np.ascontiguousarray(pixels))},
            num_tokens=self.count_tokens(item, options),
            key=blake2b(identity.encode(), digest_size=20).hexdigest(),
        )

    def count_tokens(self, item: Chart, options: Mapping[str, Any]) -> int:
        """Returns the number of patches of the picture."""
        _colour(options)
        return int((self._size // self._patch_size) ** 2)


def draw(chart: Chart, size: int, colour: str = "blue") -> Image.Image:
    """Draws a labelled bar for each value; the highest bar is as high as the picture."""
    picture = Image.new("RGB", (size, size), "white")
    pen = ImageDraw.Draw(picture)
    width = size / len(chart.values)
    highest = max(chart.values) or 1.0
    for index, (label, value) in enumerate(zip(chart.labels, chart.values, strict=True)):
        left, top = round(index * width), round(size * (1 - value / highest))
        right = max(left, round((index + 1) * width) - 2)
        pen.rectangle((left, min(top, size - 1), right, size - 1), fill=COLOURS[colour])
        pen.text((left, size - 12), label, fill="black")
    return picture


def _colour(options: Mapping[str, Any]) -> str:
    """Returns the colour of the bars. Raises MediaError for any other option."""
    colour = options.get("colour", "blue")
    if set(options) - {"colour"} or colour not in COLOURS:
        raise MediaError(
            f"got chart options {dict(options)!r}; allowed is 'colour': {', '.join(COLOURS)}"
        )
    return str(colour)


def _rows(blob: bytes) -> list[list[str]]:
    try:
        text = blob.decode("utf-8-sig")
        return [row for row in csv.reader(io.StringIO(text), strict=True) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise MediaError(f"the chart is not a CSV file: {error}") from error


def _chart(rows: Iterable[Any]) -> Chart:
    try:
        pairs = [(str(label), float(value)) for label, value in rows]
    except (TypeError, ValueError) as error:
        raise MediaError(f"each row of a chart is a label and a number: {error}") from error
    if not pairs or any(not math.isfinite(value) or value < 0 for _, value in pairs):
        raise MediaError("a chart needs at least one row, and numbers of 0 or more")
    labels, values = zip(*pairs, strict=True)
    return Chart(labels=labels, values=values)
