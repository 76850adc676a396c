"""Qianfan-OCR, whose architecture is InternVL's."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset

QIANFAN = ReadingPreset(
    name="qianfan-ocr",
    aliases=("qianfan",),
    architectures=("QianfanOCRForConditionalGeneration",),
    tasks={"page": "Parse this document to Markdown."},
    max_tokens=16384,
    sampling={"no_repeat_ngram": True},
    convert="mmdeploy_llm.batch.documents.reading.markup.marks:plain",
    source="The prompt: the model's card. 16,384 tokens and the loop guard: choices of this "
    "preset.",
)
