"""olmOCR, a Qwen2-VL and then a Qwen2.5-VL."""

from __future__ import annotations

from mmdeploy_llm.hooks import ReadingPreset

PAGE = """\
Attached is one page of a document that you must process. Just return the plain text \
representation of this document as if you were reading it naturally. Convert equations to LateX \
and tables to HTML.
If there are any figures or charts, label them with the following markdown syntax ![Alt text \
describing the contents of the figure](page_startx_starty_width_height.png)
Return your output as markdown, with a front matter section on top specifying values for the \
primary_language, is_rotation_valid, rotation_correction, is_table, and is_diagram parameters."""

# Of the version of February 2025, which was given the text layer of a page.
ANCHORED = """\
Below is the image of one page of a document, as well as some raw textual content that was \
previously extracted for it. Just return the plain text representation of this document as if you \
were reading it naturally.
Do not hallucinate.
RAW_TEXT_START
Page dimensions: {width}x{height}
{text_layer}
RAW_TEXT_END"""

OLMOCR = ReadingPreset(
    name="olmocr",
    aliases=("olmocr-2",),
    architectures=(
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    ),
    marks=("olmocr",),
    tasks={"page": PAGE, "anchored": ANCHORED},
    longest_side=1288,
    image_tokens="full",
    max_tokens=8000,
    convert="mmdeploy_llm.batch.documents.reading.markup.marks:front_matter",
    source='The prompt of a page (the toolkit\'s "no anchoring, version 4"), 1,288 pixels, 8,000 '
    "tokens: the family's toolkit. The prompt with the text layer: its first version, from memory; "
    "the toolkit adds places of texts and pictures, this preset the text alone.",
)
