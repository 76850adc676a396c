"""MinerU 2.5, a Qwen2-VL. Its authors find the regions of a page first and read each alone; here it
is asked for the text of the whole page, or of a picture of one region."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset

MINERU = ReadingPreset(
    name="mineru",
    aliases=("mineru2.5",),
    architectures=("Qwen2VLForConditionalGeneration",),
    marks=("mineru",),
    tasks={
        "page": "\nText Recognition:",
        "table": "\nTable Recognition:",
        "formula": "\nFormula Recognition:",
        "layout": "\nLayout Detection:",
    },
    system="You are a helpful assistant.",
    image_tokens="full",
    sampling={"no_repeat_ngram_size": 100, "skip_special_tokens": False},
    convert="mmdeploy_llm.batch.documents.reading.markup.marks:cells",
    source="Prompts, the system message and 100 as the size of n-grams: the family's client "
    "library, from memory.",
)
