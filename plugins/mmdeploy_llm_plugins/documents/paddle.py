"""PaddleOCR-VL. Its authors find the regions of a page first; asked for a whole page it reads the
text."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset

PADDLE = ReadingPreset(
    name="paddleocr-vl",
    aliases=("paddleocr",),
    architectures=("PaddleOCRVLForConditionalGeneration",),
    tasks={
        "page": "OCR:",
        "table": "Table Recognition:",
        "formula": "Formula Recognition:",
        "chart": "Chart Recognition:",
        "seal": "Seal Recognition:",
    },
    max_tokens=4096,
    sampling={"skip_special_tokens": False},  # the cells of tables are special tokens
    convert="mmdeploy_llm.batch.documents.reading.markup.marks:cells",
    source="Prompts: the cards of PaddleOCR-VL and 1.5. The loop guard is the family's "
    "(plugin paddleocr). 4,096 tokens: a choice of this preset.",
)
