"""Presets of OCR families for `mmdeploy-llm read`: a small file for each."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset, hookimpl

from .deepseek import DEEPSEEK
from .docling import DOCLING
from .dots import DOTS
from .formulanet import FORMULANET
from .glm import GLM
from .kosmos import KOSMOS
from .lighton import LIGHTON
from .mineru import MINERU
from .olmocr import OLMOCR
from .paddle import PADDLE
from .qianfan import QIANFAN


@hookimpl
def provide_reading_presets() -> tuple[ReadingPreset, ...]:
    """Returns the presets."""
    others = (FORMULANET, KOSMOS)  # of families that are no chat models
    return (DEEPSEEK, DOCLING, DOTS, GLM, LIGHTON, MINERU, OLMOCR, PADDLE, QIANFAN, *others)
