"""dots.ocr and dots.mocr, which answer with the elements of a page as JSON."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset

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
