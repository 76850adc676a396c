#!/usr/bin/env bash
# The text of a PDF page, read with pypdfium2 5.15.2, beside the page as the same library draws it. The
# text is not that of the picture: it has what is not drawn, and its lines may come backwards.
#
#     page                                         drawn              get_text_range()
#     a line in a layer that is off                nothing            the line
#     a line in a form with such a layer           nothing            the line
#     a line outside of the crop box               nothing            the line
#     a layer that is off, as the only one of a    nothing            the line
#     rule that shows what is off (AllOff)
#     three lines, /Rotate 90                      three, lying       the third, the second, the first
#     three lines, /Rotate 0, 180 or 270           three              the first, the second, the third
#     three upright lines on a /Rotate 90 page     three, upright     the first, the second, the third
#
# Who gives a model a page as a picture together with its text gives it words that nobody sees. The
# order turns because PDFium looks at the page as it is shown: lines that run down it are columns
# there, of which the first stands right, and it takes columns from left to right.
# FPDFPage_SetRotation before the text is loaded, to what makes the text upright
# (FPDFText_GetCharAngle says it), gives the order of the file again.
# The fourth row: ISO 32000-2, 8.11.2.2 wants the line drawn, PDFium takes a rule (OCMD) whose /OCGs
# is one layer, not a list, for that layer.
#
# Seen with Python 3.11, Linux x86-64, 2026-11-29. Needs Python 3.11 or newer and the package index.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pypdfium2==5.15.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import pypdfium2
import pypdfium2.raw as raw

LAYERS = "/OCProperties << /OCGs [6 0 R] /D << /OFF [6 0 R] >> >>"
FONT = "/Font << /F 3 0 R >>"
LINE = "BT /F 12 Tf 20 150 Td (a line) Tj ET"
THREE = "BT /F 12 Tf 18 TL 20 150 Td (one) Tj T* (two) Tj T* (three) Tj ET"
UPRIGHT = "BT /F 12 Tf 18 TL 0 1 -1 0 50 20 Tm (one) Tj T* (two) Tj T* (three) Tj ET"


def stream(content, more=""):
    return f"<< /Length {len(content)} {more} >>\nstream\n{content}\nendstream"


def page_of(content, page="", resources="", more=()):
    """Returns a page of a document that is written by hand."""
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {LAYERS} >>",
        "<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 5 0 R {page} "
        f"/Resources << {FONT} {resources} >> >>",
        stream(content),
        "<< /Type /OCG /Name (off) >>",
        *more,
    ]
    out, places = "%PDF-1.7\n", []
    for number, own in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{own}\nendobj\n"
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n"
    table += "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    return pypdfium2.PdfDocument((out + table + end).encode())[0]


def seen(page):
    """Returns whether anything is drawn, and the lines of the text."""
    is_drawn = bool((page.render().to_numpy() < 128).any())
    return is_drawn, page.get_textpage().get_text_range().split()


MARKED = f"/OC /L BDC {LINE} EMC"
FORM = stream(
    LINE, f"/Type /XObject /Subtype /Form /BBox [0 0 200 200] /OC 6 0 R /Resources << {FONT} >>"
)
RULE = "<< /Type /OCMD /P /AllOff /OCGs {} >>"
HIDDEN = {
    "a layer that is off": page_of(MARKED, resources="/Properties << /L 6 0 R >>"),
    "a form in it": page_of("/X Do", resources="/XObject << /X 7 0 R >>", more=[FORM]),
    "outside of the crop box": page_of(LINE, "/CropBox [0 0 200 100]"),
    "a rule about one layer": page_of(
        MARKED, resources="/Properties << /L 7 0 R >>", more=[RULE.format("6 0 R")]
    ),
}
for name, page in HIDDEN.items():
    found = seen(page)
    print(f"{name}: drawn {found[0]}, text {found[1]}")
    assert found == (False, ["a", "line"]), "it has changed"
as_list = page_of(MARKED, resources="/Properties << /L 7 0 R >>", more=[RULE.format("[6 0 R]")])
print(f"the same rule about a list of one layer: drawn {seen(as_list)[0]}")
assert seen(as_list)[0]

for rotate in (0, 90, 180, 270):
    page = page_of(THREE, f"/Rotate {rotate}")
    found = seen(page)[1]
    print(f"/Rotate {rotate}: {found}")
    assert found == (["three", "two", "one"] if rotate == 90 else ["one", "two", "three"])
    raw.FPDFPage_SetRotation(page, 0)
    assert seen(page)[1] == ["one", "two", "three"]
print(f"/Rotate 90, its text upright: {seen(page_of(UPRIGHT, '/Rotate 90'))[1]}")
assert seen(page_of(UPRIGHT, "/Rotate 90"))[1] == ["one", "two", "three"]
PYTHON
