"""GLM-OCR."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset

GLM = ReadingPreset(
    name="glm-ocr",
    architectures=("GlmOcrForConditionalGeneration",),
    tasks={
        "page": "Text Recognition:",
        "table": "Table Recognition:",
        "formula": "Formula Recognition:",
    },
    image_tokens="full",  # "auto" is the bound of its own file too
    convert="mmdeploy_llm.batch.documents.reading.markup.marks:plain",
    source="Prompts: the model's card. The loop guard is the family's (plugin glm). 8,192 tokens: "
    "a choice of this preset.",
)
