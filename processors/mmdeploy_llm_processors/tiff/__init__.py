"""TIFF files of several pages, such as scans and faxes, whose pages are images. A file of one page
is an image."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaProcessorSpec, hookimpl


@hookimpl
def provide_media_processors() -> tuple[MediaProcessorSpec, ...]:
    """Returns the spec. It claims no suffix and no first bytes, which are those of images."""
    return (
        MediaProcessorSpec(
            name="tiff",
            kind="tiff",
            factory="mmdeploy_llm_processors.tiff.splitter:TIFFSplitter",
            yields="image",
        ),
    )
