"""Answers of OCR models become Markdown; those that are malformed are refused, never shortened."""

import pytest

from mmdeploy_llm.batch.documents.reading.markup import blocks, doctags, elements, marks
from mmdeploy_llm.hooks import ReadPage, ReadText

PAGE = ReadPage(task="page")
PIPES = ReadPage(task="page", tables="markdown")

DOCTAGS = """<doctag><page_header><loc_1><loc_2><loc_3><loc_4>ACME</page_header>
<title>A report</title><section_header_level_1><loc_9><loc_9>Parts</section_header_level_1>
<text><loc_1><loc_2><loc_3><loc_4>Some <b> words.</text>
<unordered_list><list_item>one</list_item><list_item>two</list_item></unordered_list>
<ordered_list><list_item>first<unordered_list><list_item>in it</list_item></unordered_list>
</list_item></ordered_list>
<otsl><loc_1><loc_2><caption>Sizes</caption><ched>a<ched>b<nl><fcel>1<fcel>2<nl></otsl>
<picture><loc_5><loc_6><loc_7><loc_8><caption>A cat</caption></picture>
<formula>E = m c^2</formula><code><_Python_>print("<tag>")</code>
<checkbox_selected>yes</checkbox_selected><footnote>1 a note</footnote>
<page_footer>3</page_footer></doctag>"""
MARKDOWN = """<!-- page header: ACME -->

# A report

## Parts

Some <b> words.

- one
- two

1. first
  - in it

Sizes

| a | b |
| --- | --- |
| 1 | 2 |

<!-- picture [5, 6, 7, 8] -->

A cat

$$
E = m c^2
$$

```python
print("<tag>")
```

- [x] yes

1 a note

<!-- page footer: 3 -->"""


def test_doctags_become_markdown():
    assert doctags.to_markdown(DOCTAGS, PIPES) == MARKDOWN


def test_doctags_that_are_cut_off_keep_what_there_is():
    assert doctags.to_markdown("<doctag><text>one</text><text>tw", PAGE) == "one\n\ntw"


@pytest.mark.parametrize(
    "text",
    [
        "words only",
        "<doctag></text></doctag>",
        "<doctag><otsl><fcel>a<nl><fcel>b<fcel>c<nl></otsl></doctag>",
        "<text>" * 1000,
    ],
)
def test_malformed_doctags_are_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        doctags.to_markdown(text, PAGE)


def test_elements_become_markdown():
    text = """```json
[{"bbox": [1, 2, 3, 4], "category": "Page-header", "text": "ACME -- 1"},
 {"category": "Title", "text": "A report"}, {"category": "Section-header", "text": "## Parts"},
 {"category": "List-item", "text": "one"}, {"category": "List-item", "text": "- two"},
 {"category": "Formula", "text": "$$x$$"}, {"bbox": [5, 6, 7, 8], "category": "Picture"},
 {"category": "Table", "text": "<table><tr><td>1</td></tr></table>"}, {"text": "words"}]
```"""
    assert elements.to_markdown(text, PIPES) == (
        "<!-- page header: ACME - - 1 -->\n\n# A report\n\n## Parts\n\n- one\n\n- two\n\n"
        "$$\nx\n$$\n\n<!-- picture [5, 6, 7, 8] -->\n\n| 1 |\n| --- |\n\nwords"
    )


@pytest.mark.parametrize(
    "text", ['[{"category": "Text", "text": "cut', "words", "[1]", '[{"text": 3}]', "[" * 100_000]
)
def test_elements_that_are_no_elements_are_refused(text):
    with pytest.raises(ValueError, match=r"answer|element"):
        elements.to_markdown(text, PAGE)


def test_marks_of_places_are_taken_out_and_texts_stay():
    text = (
        "<|ref|>title<|/ref|><|det|>[[1, 2, 3, 4]]<|/det|>\n# A report\n\n"
        "<|ref|>image<|/ref|><|det|>[[5, 6, 7, 8]]<|/det|>\n"
        "<|ref|>the year<|/ref|><|det|>[[0]]<|/det|>"
    )
    assert marks.placed(text, PAGE) == ("# A report\n\n<!-- picture [[5, 6, 7, 8]] -->\nthe year\n")
    with pytest.raises(ValueError, match="no end"):
        marks.placed("<|ref|>title<|/ref|><|det|>[[1, 2", PAGE)


def test_cells_in_a_text_become_a_table():
    text = "before\n<fcel>a<fcel>b<nl><fcel>1<fcel>2<nl>\nafter"
    assert marks.cells(text, PIPES) == ReadText(
        text="before\n\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nafter"
    )
    broken = "<fcel>a<nl><fcel>b<fcel>c<nl>"
    found = marks.cells(broken, PAGE)
    assert found.text == broken
    assert "stays as it was" in found.notes[0]


def test_front_matter_is_a_comment_and_a_turned_page_is_told():
    text = "---\na: en\nis_rotation_valid: False\nrotation_correction: 90\n---\nWords"
    found = marks.front_matter(text, PAGE)
    assert found.text.endswith("rotation_correction: 90 -->\n\nWords")
    assert found.notes == ("the model calls the page turned, by 90 degrees",)
    with pytest.raises(ValueError, match="values"):
        marks.front_matter("Words", PAGE)


def test_fences_around_a_whole_answer_are_taken_off():
    assert marks.plain("```markdown\n# A\n```", PAGE) == "# A"
    assert marks.plain("```\na\n```\nb\n```\nc\n```", PAGE).startswith("```\na")
    assert marks.plain("\\[x\\]", ReadPage(task="formula")) == "$$\nx\n$$"


def test_comments_and_fences_cannot_be_left():
    assert blocks.comment("a --> b <!-- c") == "<!-- a - - > b <!- - c -->"
    assert blocks.code("```\nx") == "````\n```\nx\n````"
