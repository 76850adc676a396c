"""Calls in this process what workers do with PDFium: descriptions, pixels, texts and errors."""

from pathlib import Path

import numpy as np
import pytest
from mmdeploy_llm_processors.pdf import library

from mmdeploy_llm.errors import MediaError, MediaLimitError

BLOB = (Path(__file__).parents[2] / "examples/documents/shapes.pdf").read_bytes()
LIMITS = {"max_pixels": 10_000}
pytestmark = pytest.mark.skipif(library.raw is None, reason="pypdfium2 is not installed")


def test_pages_are_described():
    ((found, _),) = library.describe(BLOB, LIMITS, None, "2")
    assert (found["num_pages"] >= 2, found["indexes"]) == (True, [1])
    ((every, _),) = library.describe(BLOB, LIMITS, None, None)
    assert len(every["sizes"]) == every["num_pages"]
    assert all(min(size) > 0 for size in every["sizes"])


def test_a_page_is_drawn_and_read():
    ((_, pixels),) = library.draw(BLOB, LIMITS, None, 0, (60, 80))
    assert (pixels.shape, pixels.dtype) == ((80, 60, 3), np.uint8)
    assert 0 < (pixels < 255).mean() < 1
    ((found, _),) = library.read_text(BLOB, LIMITS, None, 0)
    assert isinstance(found["text"], str)


@pytest.mark.parametrize(
    ("blob", "message"),
    [(b"", "is empty"), (b"%PDF-1.4 nothing", "PDFium finds no document"), (b"x" * 99, "no PDF")],
    ids=["empty", "cut off", "other"],
)
def test_what_is_no_document_is_named(blob, message):
    with pytest.raises(MediaError, match=message):
        next(library.describe(blob, LIMITS, None, None))


def test_limits_and_pages_that_are_not_there():
    with pytest.raises(MediaLimitError, match="101 x 100 pixels, 10000 are allowed"):
        next(library.draw(BLOB, LIMITS, None, 0, (101, 100)))
    with pytest.raises(MediaError, match="page 100 of the pdf cannot be read"):
        next(library.draw(BLOB, LIMITS, None, 99, (10, 10)))
    with pytest.raises(MediaLimitError, match="100001 pages"):
        library._check_count(100_001)
    with pytest.raises(MediaError, match="of which 1 can be read"):
        library._check_readable([(1.0, 1.0), *[(0.0, 0.0)] * 200])
