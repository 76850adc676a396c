"""PDF documents, whose pages are images. A page is drawn at the size at which the model sees it, in
a process that may die: hostile files crash PDFium, and it may not be used by two threads at once.
"""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, hookimpl


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec."""
    return (
        MediaProcessorSpec(
            name="pdf",
            kind="pdf",
            factory="mmdeploy_llm_processors.pdf.splitter:PDFSplitter",
            suffixes=(".pdf",),
            columns=("pdf", "pdfs"),
            first_bytes=(b"%PDF-",),
            yields="image",
        ),
    )
