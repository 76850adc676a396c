"""The image processor of Gemma 4: an image is resized to as many tokens as a budget allows, and has
markers around its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Self

from mmdeploy_llm_processors.image.budget import too_few
from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.processor import ImageProcessor

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput
from mmdeploy_llm.media import DecodedImage, ImageHeader

BUDGETS: Final = (70, 140, 280, 560, 1120)  # tokens of an image that the model was trained with
BUDGET: Final = "max_soft_tokens"  # transformers' name
MERGE = 3
START, END = "<|image>", "<image|>"


class Gemma4ImageProcessor(ImageProcessor):
    """Gemma 4: at most 280 tokens by default, each of 48 x 48 pixels, between 0 and 1.

    max_soft_tokens sets the budget, one of BUDGETS, of all images, or less of one; max_pixels does
    so in pixels.
    """

    token = "<|image|>"
    markers = ("<|image|>",)
    default = ImageOptions(
        min_pixels=1, max_pixels=280 * 48 * 48, patch_size=16, merge_size=MERGE, do_normalize=False
    )
    reads_pixel_bounds = False

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._config = checkpoint.config
        self._cell = cell_of(checkpoint.config)
        file = checkpoint.preprocessor
        from_file = _in_pixels(file, self._cell, CheckpointError, "preprocessor_config.json")
        given = _in_pixels(options, self._cell, ConfigError, "mm_processor_kwargs")
        budget = {name: from_file[name] for name in ("max_pixels",) if BUDGET in file}
        super().__init__(checkpoint, {**budget, **given})
        self._given = frozenset(given)
        if "max_pixels" in given:
            self.auto_tokens = max(BUDGETS[0], self.options.max_pixels // self.area)
        check_budget(self.options.max_pixels // self.options.factor**2, checkpoint.config)

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> Self:
        """See ImageProcessor: the budget is the largest of BUDGETS that is not above `tokens`."""
        limited = super().with_budget(known_budget(tokens), may_raise=may_raise)
        check_budget(limited.options.max_pixels // self.area, self._config)
        return limited

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """See ImageProcessor."""
        made = super().process(item, self._own(options))
        return replace(made, prompt_text=self._text(made.num_tokens))

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> int:
        """See ImageProcessor."""
        return super().count_tokens(item, self._own(options))

    def prompt_text(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> str:
        """Returns the placeholders of an image of this size between its markers."""
        return self._text(self.count_tokens(item, options))

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. The grid is needed."""
        made = super().embedded(num_tokens, grid, options)
        return replace(made, prompt_text=self._text(made.num_tokens))

    def target_size(
        self, height: int, width: int, options: ImageOptions | None = None
    ) -> tuple[int, int]:
        """See fit_budget."""
        own = options or self.options
        return (
            fit_budget(height, width, own)
            if own.do_resize
            else super().target_size(height, width, own)
        )

    def _own(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return _in_pixels(given, self._cell, MediaError, "mm_processor_kwargs")

    def _text(self, num_tokens: int) -> str:
        return f"{START}{self.token * num_tokens}{END}"


def fit_budget(height: int, width: int, options: ImageOptions) -> tuple[int, int]:
    """Returns (height, width) after resizing: the largest multiples of `factor` with nearly the
    same aspect whose area is at most max_pixels. A side that would vanish is one `factor`.

    Source: transformers' Gemma4ImageProcessor. Raises MediaError if max_pixels is below one cell.
    """
    factor = options.factor
    scale = math.sqrt(options.max_pixels / (height * width))
    rows, columns = (math.floor(scale * side / factor) for side in (height, width))
    most = options.max_pixels // factor**2
    if not most:
        raise MediaError(
            f"max_pixels = {options.max_pixels} is below the {factor**2} pixels of one token; "
            "raise it"
        )
    if rows == 0 and columns == 0:
        rows = columns = 1
    elif rows == 0:
        rows, columns = 1, min(width // height, most)
    elif columns == 0:
        rows, columns = min(height // width, most), 1
    return rows * factor, columns * factor


def known_budget(tokens: int) -> int:
    """Returns the largest of BUDGETS that is not above `tokens`. Raises ConfigError if there is
    none."""
    known = [budget for budget in BUDGETS if budget <= tokens]
    if not known:
        raise too_few(tokens, BUDGETS[0], "the smallest budget that this model was trained with")
    return known[-1]


def cell_of(config: Any) -> int:
    """Returns the pixels along a side of a token."""
    vision = getattr(config, "vision_config", None)
    return int(getattr(vision, "patch_size", 16) * getattr(vision, "pooling_kernel_size", MERGE))


def check_budget(num_tokens: int, config: Any) -> None:
    """Raises ConfigError for more tokens of an image or frame than the model can take: more patches
    in a line than it has positions for, or, where the tokens of an image see each other, more than
    the window of its layers."""
    vision, text = config.vision_config, getattr(config, "text_config", None)
    longest = num_tokens * getattr(vision, "pooling_kernel_size", MERGE)
    table = getattr(vision, "position_embedding_size", longest)
    if hasattr(vision, "mm_posemb_size"):  # of Gemma 4 Unified, whose tokens have them
        longest, table = num_tokens, vision.mm_posemb_size
    if longest > table:
        raise ConfigError(
            f"an image of {num_tokens} tokens may have {longest} patches in a line, but the "
            f"model knows {table} positions; lower {BUDGET}"
        )
    window = getattr(text, "sliding_window", None) or num_tokens
    if getattr(text, "use_bidirectional_attention", None) == "vision" and num_tokens > window:
        raise ConfigError(
            f"an image of up to {num_tokens} tokens does not fit into this model's attention "
            f"window of {window}; lower {BUDGET}"
        )


def _in_pixels(
    given: Mapping[str, Any], cell: int, error: type[Exception], where: str
) -> Mapping[str, Any]:
    """Returns the options with max_pixels in place of the budget in tokens of `cell` x `cell`
    pixels. Raises `error` for a budget that is none of BUDGETS, and for both options."""
    if BUDGET not in given:
        return given
    others = {name: value for name, value in given.items() if name != BUDGET}
    if "max_pixels" in others:
        raise error(f"{where} sets max_pixels and {BUDGET}, which is the same; remove one")
    pixels = budget_pixels(given[BUDGET], cell, error, f"{where}: {BUDGET}")
    return {**others, "max_pixels": pixels}


def budget_pixels(budget: Any, cell: int, error: type[Exception], where: str) -> int:
    """Returns the pixels of a budget in tokens of `cell` x `cell` pixels. Raises `error` unless it
    is one of BUDGETS."""
    if budget not in BUDGETS or isinstance(budget, bool):
        raise error(f"{where} must be one of {', '.join(map(str, BUDGETS))}, got {budget!r:.80}")
    return int(budget) * cell**2
