"""Splits a TIFF file into its pages, each a TIFF file whose first picture is the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits, MediaSplitter, SplitPart
from mmdeploy_llm.media import PageParts, decode_image
from mmdeploy_llm.media.documents.page_ranges import parse_pages
from mmdeploy_llm.media.image.tiff import pages_of, with_first

MAX_PAGES = 100_000
TURNS = (0, 90, 180, 270)


class TIFFSplitter(MediaSplitter):
    """Splits files into pages. checkpoint, options: of the engine, which it does not need.
    Thread-safe."""

    kind = "tiff"
    markers = ("<|tiff|>",)
    part_name = "page"
    range_option = "pages"
    drawing_options = ("turn",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        pass

    def split(
        self, source: Any, options: Mapping[str, Any], limits: MediaLimits
    ) -> Sequence[SplitPart]:
        """Finds the pages; decodes none."""
        if not isinstance(source, (bytes, bytearray, memoryview)):
            raise UnsupportedMediaError(
                f"a tiff is given as a path, a URL or bytes, got {type(source).__name__}"
            )
        if unknown := [name for name in options if name not in ("pages", "turn")]:
            raise MediaError(f"a tiff has no option {str(unknown[0])[:40]!r}; known: pages, turn")
        if (turn := options.get("turn", 0)) not in TURNS:
            raise MediaError(f"turn of a tiff must be 0, 90, 180 or 270, got {turn!r:.40}")
        blob, wanted = bytes(source), options.get("pages")
        limits.check_bytes(len(blob), "the tiff")
        places = _places(blob)
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            wanted = str(wanted)
        if wanted is not None and not isinstance(wanted, str):
            raise MediaError(f"pages of a tiff must be a text, got {wanted!r:.40}")
        count = len(places)
        indexes = range(count) if wanted is None else parse_pages(wanted, count)
        return Pages(blob, places, indexes, turn, limits)


def _places(blob: bytes) -> list[int | None]:
    """Returns the places of the pages' directories; None for those that a damaged list has lost.
    Raises MediaError for what is no TIFF."""
    places: list[int | None] = []
    try:
        for place in pages_of(lambda at, size: blob[at : at + size]):
            places.append(place)
            if len(places) > MAX_PAGES:
                raise MediaLimitError(f"the tiff has more than {MAX_PAGES} pages")
    except EOFError:
        raise MediaError("the tiff is damaged, or no TIFF: it has no directory") from None
    return places


class Pages(PageParts):
    """The wanted pages of a file. turn: degrees clockwise by which each is turned."""

    def __init__(
        self,
        blob: bytes,
        places: Sequence[int | None],
        wanted: Sequence[int],
        turn: int,
        limits: MediaLimits,
    ) -> None:
        super().__init__(wanted)
        self._blob, self._places, self._turn, self._limits = blob, places, turn, limits

    def part(self, place: int) -> SplitPart:
        """Returns a page. Raises MediaError for one that a damaged list has lost."""
        directory = self._places[self.indexes[place]]
        if directory is None:
            raise MediaError(
                f"page {self.indexes[place] + 1} and those after it cannot be found: the tiff's "
                "list of pages is damaged"
            )
        source: Any = with_first(self._blob, directory)
        if self._turn:
            made = decode_image(source, self._limits)
            turned = made.image.rotate(-self._turn, expand=True)  # by right angles: exactly
            source = replace(made, image=turned, digest=f"{made.digest} {self._turn}")
        return SplitPart(source=source, label=self.label(place))
