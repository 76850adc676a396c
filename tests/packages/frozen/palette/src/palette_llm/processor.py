"""Palettes: lines of three numbers, or a list of triples; each colour is a token."""

from hashlib import blake2b

import torch
from mmdeploy_llm.errors import ConfigError, MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor

MAX_COLOURS = 256


class PaletteProcessor(MediaProcessor):
    kind = "palette"
    token = "<|colour|>"
    markers = ("<|palette|>",)

    def __init__(self, checkpoint, options):
        self._depth = options.get("depth", 8)
        if self._depth not in (4, 8):
            raise ConfigError(f"depth must be 4 or 8, got {self._depth!r}")

    def decode(self, source, limits):
        if isinstance(source, bytes):
            if len(source) > limits.max_bytes:
                raise MediaLimitError(
                    f"the palette has {len(source)} bytes, {limits.max_bytes} are allowed"
                )
            try:
                source = [line.split() for line in source.decode("ascii").splitlines() if line]
            except UnicodeDecodeError as error:
                raise MediaError(f"the palette is no text: {error}") from error
        if not isinstance(source, list | tuple):
            raise UnsupportedMediaError(f"a palette is a file or a list, got {type(source)}")
        if len(source) > MAX_COLOURS:
            raise MediaLimitError(f"{len(source)} colours, {MAX_COLOURS} are allowed")
        try:
            colours = tuple((int(red), int(green), int(blue)) for red, green, blue in source)
        except (TypeError, ValueError, OverflowError) as error:
            raise MediaError(f"a colour is three numbers: {error}") from error
        if not colours or not all(0 <= value < 256 for colour in colours for value in colour):
            raise MediaError("a palette has at least one colour, of numbers from 0 to 255")
        return colours

    def process(self, item, options):
        steps = 256 >> self._depth
        values = torch.tensor(item, dtype=torch.float32).div(steps, rounding_mode="floor")
        key = blake2b(f"{self._depth}\0{item}".encode(), digest_size=20).hexdigest()
        return MediaInput(
            kind=self.kind,
            tensors={"colours": values},
            num_tokens=self.count_tokens(item, options),
            key=key,
        )

    def count_tokens(self, item, options):
        if options:
            raise MediaError(f"a palette has no options, got {sorted(options)}")
        return len(item)
