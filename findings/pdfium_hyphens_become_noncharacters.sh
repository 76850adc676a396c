#!/usr/bin/env bash
# The text of a PDF page with a word broken after its hyphen, read with pypdfium2 5.15.2. One text page
# has two methods to read it, and what they return of the hyphen that stands at the line's end is
#
#     on the page             get_text_range()      get_text_bounded()    pypdf 7.1.1
#     self- | Attention       self<FFFE>Attention   self<02>Attention     self-\nAttention
#     some- | host.de         some<FFFE>host.de     some<02>host.de       some-\nhost.de
#     CLIP- | ViT             CLIP<FFFE>ViT         CLIP<02>ViT           CLIP-\nViT
#     Qwen- | 2               Qwen<FFFE>2           Qwen<02>2             Qwen-\n2
#     Qwen2- | VL             Qwen2-\r\nVL          Qwen2-\r\nVL          Qwen2-\nVL
#     to - | 5 degrees        to -\r\n5 degrees     to -\r\n5 degrees     to -\n5 degrees
#
# <FFFE> is U+FFFE, which Unicode says is no character, <02> the control character U+0002. PDFium takes
# the line's end for a broken word if a letter comes before the hyphen, drops the break and puts a mark
# there; whether the hyphen belongs to the word it cannot know. So the same page gives two texts that
# do not compare equal, and neither has the word: page search finds neither "self-Attention" nor
# "selfAttention", and who strips what is not printable, as cleaners of data sets do, gets somehost.de.
# XML refuses both marks (the last line), Unicode normalisation keeps both. No soft hyphen is needed:
# the page holds U+002D, and a page is right until a line happens to end in one. Put "-" or "-\n" for
# both marks before anything else; only the caller can decide whether the word is to be joined.
#
# The pages are written by reportlab 5.1.0.
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
	pypdfium2==5.15.2 reportlab==5.1.0 pypdf==7.1.1
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import unicodedata
from xml.etree import ElementTree

import pypdf
import pypdfium2
from reportlab.pdfgen import canvas

CASES = (  # lines of the page, what of "-" and the line's end is in: get_text_range, get_text_bounded
    (("self-", "Attention"), "\ufffe", "\x02"),
    (("some-", "host.de"), "\ufffe", "\x02"),
    (("CLIP-", "ViT"), "\ufffe", "\x02"),
    (("Qwen-", "2"), "\ufffe", "\x02"),
    (("Qwen2-", "VL"), "-\r\n", "-\r\n"),
    (("to -", "5 degrees"), "-\r\n", "-\r\n"),
)


def found(page, text):
    return page.search(text).get_next() is not None


for lines, in_range, in_bounds in CASES:
    drawing = canvas.Canvas("page.pdf", pagesize=(400, 300))
    for number, line in enumerate(lines):
        drawing.drawString(20, 250 - 14 * number, line)
    drawing.save()
    page = pypdfium2.PdfDocument("page.pdf")[0].get_textpage()
    texts = page.get_text_range(), page.get_text_bounded()
    before, after = lines[0].removesuffix("-"), lines[1]
    other = pypdf.PdfReader("page.pdf").pages[0].extract_text().rstrip()
    print(f"{lines}: {ascii(texts[0])}, {ascii(texts[1])}; pypdf {ascii(other)}")
    assert texts == (before + in_range + after, before + in_bounds + after), "it has changed"
    assert other == "\n".join(lines)
    if in_range != "\ufffe":
        continue
    assert found(page, before) and found(page, after)
    assert not found(page, before + "-" + after) and not found(page, before + after)
    for text in texts:
        assert unicodedata.normalize("NFKC", text) == text
        assert "".join(one for one in text if one.isprintable()) == before + after
        made = ElementTree.Element("text")
        made.text = text
        try:
            ElementTree.fromstring(ElementTree.tostring(made, encoding="unicode"))
        except ElementTree.ParseError:
            continue
        raise AssertionError("XML takes it")
print("XML refuses the texts with a mark")
PYTHON
