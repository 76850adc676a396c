"""PageNotice: says once that a TIFF image has pages that the model does not see."""

from __future__ import annotations

import logging
from contextlib import suppress
from itertools import islice

from mmdeploy_llm.media.image.tiff import first_directory, pages_of
from mmdeploy_llm.messages import MediaItem, MediaRef
from mmdeploy_llm.values.first_bytes import HEAD, format_of
from mmdeploy_llm.values.text.display import shown

logger = logging.getLogger(__name__)


class PageNotice:
    """Looks at images until one has several pages."""

    def __init__(self) -> None:
        self._is_told = False

    def see(self, item: MediaItem, blob: bytes) -> None:
        """Logs a warning for the first TIFF image of several pages."""
        found = None if self._is_told or item.kind != "image" else format_of(blob[:HEAD])
        if found is None or found.image != "TIFF":
            return
        with suppress(EOFError, OverflowError):
            read = lambda place, size: blob[place : place + size]  # noqa: E731
            if [*islice(pages_of(read), 2)] == [first_directory(read)]:
                return
            self._is_told = True
            name = shown(item.source.uri) if isinstance(item.source, MediaRef) else "a TIFF image"
            logger.warning(
                '%s has several pages, of which the first is used; an item of the kind "tiff" has '
                "all of them (said once; others may be alike)",
                name,
            )
