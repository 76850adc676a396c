"""LightOnOCR, which is given a page and no words."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset

LIGHTON = ReadingPreset(
    name="lighton-ocr",
    aliases=("lightonocr",),
    architectures=("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"),
    tasks={"page": ""},
    dpi=200,
    longest_side=1540,
    image_tokens="full",
    max_tokens=4096,
    sampling={"no_repeat_ngram": True},
    convert="mmdeploy_llm.batch.documents.reading.markup.marks:plain",
    source="No prompt, 200 dpi and 1,540 pixels: what its authors say of its training; 4,096 "
    "tokens: its card, from memory. The loop guard: a choice of this preset.",
)
