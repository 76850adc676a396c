"""Generates PDF files without any library: pages of text, twins, and pages that claim giants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmdeploy_llm.hooks import MediaLimits

from .pictures import Twins

A4 = (595, 842)  # points
GIANT = (10**7, 10**7)


def samples() -> dict[str, Any]:
    """Returns name -> source, all of different content."""
    return {
        "one page": pdf_bytes(["What is written here?"]),
        "three pages": pdf_bytes(["First page", "Second page", "Third page"]),
        "wide page": pdf_bytes(["Wide"], size=(842, 400)),
    }


def twins() -> Twins:
    """Returns name -> two sources that differ in their last page only."""
    first = ["The same page " * 20] * 2
    return {"files of two last pages": (pdf_bytes([*first, "One"]), pdf_bytes([*first, "Two"]))}


def too_large() -> dict[str, tuple[Any, MediaLimits]]:
    """Returns name -> (source, limits that it exceeds)."""
    return {"pixels of a page": (pdf_bytes(["Huge"], size=GIANT), MediaLimits())}


def pdf_bytes(pages: Sequence[str], *, size: tuple[int, int] = A4) -> bytes:
    """Returns a PDF file with a line of text on each page."""
    kids = " ".join(f"{4 + 2 * index} 0 R" for index in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for index, text in enumerate(pages):
        drawn = f"BT /F1 24 Tf 50 {size[1] - 80} Td ({text}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {size[0]} {size[1]}] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * index} 0 R >>"
        )
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    found, offsets = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(found))
        found += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    end = len(objects) + 1
    trailer = f"trailer << /Size {end} /Root 1 0 R >>\nstartxref\n{len(found)}\n%%EOF\n"
    return f"{found}xref\n0 {end}\n0000000000 65535 f \n{table}{trailer}".encode()
