"""The presets, one for each family of models that read documents."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.hooks import ReadingPreset, ReadPage

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

PAGE = """\
Please output the layout information from the PDF image, including each layout element's bbox, its \
category, and the corresponding text content within the bbox.

1. Bbox format: [x1, y1, x2, y2]

2. Layout Categories: The possible categories are ['Caption', 'Footnote', 'Formula', 'List-item', \
'Page-footer', 'Page-header', 'Picture', 'Section-header', 'Table', 'Text', 'Title'].

3. Text Extraction & Formatting Rules:
    - Picture: For the 'Picture' category, the text field should be omitted.
    - Formula: Format its text as LaTeX.
    - Table: Format its text as HTML.
    - All Others (Text, Title, etc.): Format their text as Markdown.

4. Constraints:
    - The output text must be the original text from the image, with no translation.
    - All layout elements must be sorted according to human reading order.

5. Final Output: The entire output must be a single JSON object.
"""

DOTS = ReadingPreset(
    name="dots-ocr",
    aliases=("dots", "dots-mocr"),
    architectures=("DotsOCRForCausalLM", "DotsOCRForConditionalGeneration"),
    tasks={"page": PAGE, "text": "Extract the text content from this image."},
    max_tokens=16384,
    convert="mmdeploy_llm.batch.documents.reading.markup.elements:to_markdown",
    source="Prompts, 200 dpi and 16,384 tokens: the family's own prompts and its defaults. Its "
    "authors draw at temperature 0.1; here decoding is greedy.",
)

FORMULANET = ReadingPreset(
    name="pp-formulanet",
    aliases=("formulanet",),
    architectures=("PPFormulaNetForConditionalGeneration",),
    tasks={"page": "", "formula": ""},
    max_tokens=1024,
    convert="mmdeploy_llm_plugins.documents.presets:cleaned",
    source="No prompt: the family reads pictures of single formulas. Spaces are removed as by "
    "transformers' PPFormulaNetProcessor. 1,024 tokens: a choice of this preset.",
)


def cleaned(answer: str, page: ReadPage) -> str:
    """Returns an answer without the spaces that LaTeX does not need, in a block of its own."""
    found: str = _processor().post_process_generation(answer)
    return f"$$\n{found.strip()}\n$$" if found.strip() else ""


def _processor() -> Any:
    """Returns transformers' processor without its parts, of which its rules for texts need none."""
    from transformers import PPFormulaNetProcessor  # seconds, for those who read formulas

    accept = {"check_argument_for_proper_class": lambda *_: None}
    rules: Any = type("Rules", (PPFormulaNetProcessor,), accept)
    return rules(None, None)


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

KOSMOS = ReadingPreset(
    name="kosmos-2.5",
    aliases=("kosmos",),
    architectures=("Kosmos2_5ForConditionalGeneration",),
    tasks={"page": "<md>", "text": "<ocr>"},
    max_tokens=2000,
    source="Prompts: transformers' documentation. 2,000 tokens: what the 4,096 positions of the "
    "model leave beside a page.",
)

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
