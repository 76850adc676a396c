"""DeepSeek-OCR 2."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset

DEEPSEEK = ReadingPreset(
    name="deepseek-ocr",
    aliases=("deepseek-ocr-2",),
    architectures=("DeepseekOcr2ForConditionalGeneration", "DeepseekOCRForCausalLM"),
    tasks={
        "page": "<|grounding|>Convert the document to markdown.",
        "text": "Free OCR.",
        "figure": "Parse the figure.",
    },
    # The marks of places are special tokens.
    sampling={
        "skip_special_tokens": False,
        "no_repeat_ngram": {"size": 30, "window": 90, "may_repeat": ["<td>", "</td>"]},
    },
    convert="mmdeploy_llm.batch.documents.reading.markup.marks:placed",
    source="Prompts, greedy decoding, 8,192 tokens, the loop guard (30 in 90, cells may repeat): "
    "the model's card and vLLM's recipe for it.",
)
