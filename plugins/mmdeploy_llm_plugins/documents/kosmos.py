"""Kosmos-2.5, which writes Markdown, or the lines of a page with their places."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset

KOSMOS = ReadingPreset(
    name="kosmos-2.5",
    aliases=("kosmos",),
    architectures=("Kosmos2_5ForConditionalGeneration",),
    tasks={"page": "<md>", "text": "<ocr>"},
    max_tokens=2000,
    source="Prompts: transformers' documentation. 2,000 tokens: what the 4,096 positions of the "
    "model leave beside a page.",
)
