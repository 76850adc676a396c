"""Presets of OCR families for `mmdeploy-llm read`."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset, hookimpl

from .olmocr import OLMOCR
from .presets import (
    DEEPSEEK,
    DOCLING,
    DOTS,
    FORMULANET,
    GLM,
    KOSMOS,
    LIGHTON,
    MINERU,
    PADDLE,
    QIANFAN,
)


@hookimpl
def provide_reading_presets() -> tuple[ReadingPreset, ...]:
    """Returns the presets."""
    others = (FORMULANET, KOSMOS)  # of families that are no chat models
    return (DEEPSEEK, DOCLING, DOTS, GLM, LIGHTON, MINERU, OLMOCR, PADDLE, QIANFAN, *others)
