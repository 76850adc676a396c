"""Applies the budgets of an engine to its media processors, and says what a photo costs then."""

from __future__ import annotations

import logging

import numpy as np

from mmdeploy_llm.errors import ConfigError, MMDeployLLMError, PluginContractError
from mmdeploy_llm.hooks import MediaLimits, MediaProcessor
from mmdeploy_llm.media.budgets.choice import resolved
from mmdeploy_llm.media.budgets.photo import PHOTO
from mmdeploy_llm.values.options.budget import TokenBudget

from .protocols import CanPeek

logger = logging.getLogger(__name__)


def within_budget(processor: MediaProcessor, budget: TokenBudget) -> MediaProcessor:
    """Returns the processor with its budget, and logs what it comes to.

    Raises ConfigError for a number that the family cannot keep to, or whose plugin knows no budget;
    with "auto" the family's own rule holds then, which is logged.
    """
    kind, tokens = processor.kind, resolved(budget, processor)
    if tokens is None:
        has_none = type(processor).with_budget is MediaProcessor.with_budget
        if budget == "auto" and has_none:
            logger.warning(
                "%s_tokens = 'auto' changes nothing: media processor %s (plugin %s) names no "
                "number",
                kind,
                type(processor).__name__,
                type(processor).__module__,
            )
        return processor
    try:
        limited = processor.with_budget(tokens, may_raise=budget != "auto")
    except ConfigError as error:
        if budget != "auto":
            raise
        logger.warning("%s_tokens = 'auto' changes nothing: %s", kind, error)
        return processor
    if not isinstance(limited, MediaProcessor) or limited.kind != kind:
        raise PluginContractError(
            f"with_budget of media processor {type(processor).__name__} (plugin "
            f"{type(processor).__module__}) must return a MediaProcessor of the kind {kind!r}, got "
            f"{type(limited).__name__}"
        )
    _say(limited, budget)
    return limited


def _say(processor: MediaProcessor, budget: TokenBudget) -> None:
    """Logs the tokens of a photo, where the processor counts them by its size."""
    if processor.kind != "image" or not isinstance(processor, CanPeek):
        return
    width, height = PHOTO
    photo = np.broadcast_to(np.uint8(0), (height, width, 3))  # one byte of memory
    try:
        found = processor.count_tokens(processor.peek(photo, MediaLimits()), {})
    except MMDeployLLMError as error:
        logger.warning("image_tokens = %r: a photo of 12 MP is refused: %s", budget, error)
        return
    logger.info(
        "image_tokens = %r: 12 MP photos become %dx%d -> %s tokens",
        budget,
        width,
        height,
        f"{found:,}",
    )
