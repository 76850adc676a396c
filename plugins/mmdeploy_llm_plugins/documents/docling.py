"""Granite Docling, and SmolDocling, which it follows; both answer in DocTags."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset

DOCLING = ReadingPreset(
    name="granite-docling",
    aliases=("docling", "smoldocling"),
    architectures=("GraniteDoclingForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    marks=("docling",),  # the second architecture is that of general models too
    tasks={
        "page": "Convert this page to docling.",
        "table": "Convert table to OTSL.",
        "formula": "Convert formula to latex.",
        "code": "Convert code to text.",
    },
    sampling={"skip_special_tokens": False},  # the tags are special tokens
    convert="mmdeploy_llm.batch.documents.reading.markup.doctags:to_markdown",
    source="The prompt of a page and 8,192 tokens: the model's card. The other prompts: from "
    "memory of the list of instructions there.",
)
