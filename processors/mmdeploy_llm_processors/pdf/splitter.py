"""Splits a PDF document into its pages, each a Drawing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, MediaLimits, MediaSplitter, SplitPart
from mmdeploy_llm.media import Drawing, PageParts, Workers

LIBRARY = "mmdeploy_llm_processors.pdf.library"
POINTS = 72  # of an inch
DPI = 200  # where the model's budget does not ask for less
MAX_DPI = 2400
TURNS = (0, 90, 180, 270)
MOST_PIXELS = 2**24  # of a page whose dpi nobody has given


@dataclass(frozen=True, slots=True, kw_only=True)
class PDFOptions:
    """Options of one document.

    pages: such as "1-5,8,-1"; None: all. password: of an encrypted one. dpi: pixels of an inch at
        most, of which a model may see fewer. longest_side: pixels of a page's longer side at most.
        turn: degrees clockwise by which pages are turned after that.
    """

    pages: str | None = None
    password: str | None = None
    dpi: float | None = None
    longest_side: int | None = None
    turn: int = 0

    @classmethod
    def given(cls, options: Mapping[str, Any]) -> PDFOptions:
        """Reads options. Raises MediaError for unknown names and wrong values."""
        names = ("pages", "password", "dpi", "longest_side", "turn")
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
                raise MediaError(f"a pdf has no option {str(name)[:40]!r}; {hint}")
        values = {name: value for name, value in options.items() if value is not None}
        if isinstance(values.get("pages"), int) and not isinstance(values["pages"], bool):
            values["pages"] = str(values["pages"])
        for name in ("pages", "password"):
            if name in values and not isinstance(values[name], str):
                raise MediaError(f"{name} of a pdf must be a text, got {values[name]!r:.40}")
        for name, most in (("dpi", MAX_DPI), ("longest_side", 2**16)):
            value = values.get(name, 1)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 1 <= value <= most:
                raise MediaError(f"{name} of a pdf must be from 1 to {most}, got {value!r:.40}")
        if values.get("turn", 0) not in TURNS:
            raise MediaError(f"turn of a pdf must be 0, 90, 180 or 270, got {values['turn']!r:.40}")
        if "longest_side" in values:
            values["longest_side"] = int(values["longest_side"])
        return cls(**values)

    def size(self, width: float, height: float) -> tuple[int, int]:
        """Returns the (width, height) in pixels of a page whose size is in points."""
        scale = (DPI if self.dpi is None else self.dpi) / POINTS
        if self.dpi is None:
            scale = min(scale, (MOST_PIXELS / (width * height)) ** 0.5)
        if self.longest_side is not None:
            scale = min(scale, self.longest_side / max(width, height))
        size = max(1, round(width * scale)), max(1, round(height * scale))
        return size if self.turn % 180 == 0 else size[::-1]


class PDFSplitter(MediaSplitter):
    """Splits documents into pages. checkpoint, options: of the engine, which it does not need.
    Thread-safe."""

    kind = "pdf"
    markers = ("<|pdf|>",)
    part_name = "page"
    range_option = "pages"
    drawing_options = ("dpi", "longest_side", "password", "turn")

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._workers = Workers()

    def split(
        self, source: Any, options: Mapping[str, Any], limits: MediaLimits
    ) -> Sequence[SplitPart]:
        """Reads how many pages there are, and how large the wanted ones are; draws none."""
        if not isinstance(source, (bytes, bytearray, memoryview)):
            raise UnsupportedMediaError(
                f"a pdf is given as a path, a URL or bytes, got {type(source).__name__}"
            )
        own, blob = PDFOptions.given(options), bytes(source)
        limits.check_bytes(len(blob), "the pdf")
        [(found, mended)] = self._workers.decode(
            f"{LIBRARY}:describe", blob, limits, password=own.password, pages=own.pages
        )
        document = _Document(
            workers=self._workers,
            blob=blob if mended is None else mended.tobytes(),
            password=own.password if mended is None else None,
            digest=blake2b(blob, digest_size=20).hexdigest(),
        )
        sizes = tuple(map(tuple, found["sizes"]))
        return Pages(document, own, tuple(found["indexes"]), sizes, limits, _notes(found))

    def close(self) -> None:
        """Ends the processes that draw."""
        self._workers.close()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Document:
    """A document and the processes that read it. digest: of its bytes."""

    workers: Workers
    blob: bytes
    password: str | None
    digest: str


class PageDrawing(Drawing):
    """A page of a document. index: from 0. turn: see PDFOptions. size: of the turned page."""

    def __init__(
        self, document: _Document, index: int, size: tuple[int, int], turn: int = 0
    ) -> None:
        self._document, self.index, self._turn = document, index, turn
        self.size = size
        self.digest = f"{document.digest} {index}{f' turned {turn}' if turn else ''}"

    def draw(self, size: tuple[int, int], limits: MediaLimits) -> np.ndarray:
        """See Drawing. Raises MediaError for a page that is damaged."""
        own = self._document
        [(fields, pixels)] = own.workers.decode(
            f"{LIBRARY}:draw",
            own.blob,
            limits,
            password=own.password,
            page=self.index,
            size=list(size),
            turn=self._turn,
        )
        assert pixels is not None, "draw yields pixels"
        self.notes = tuple(fields["notes"])
        return pixels

    def __repr__(self) -> str:
        return f"PageDrawing(page {self.index + 1}, {self.size[0]} x {self.size[1]})"


def _notes(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is told of a document. found: what `describe` yields."""
    num, said = found["num_pages"], found.get("said")
    if said is not None:
        yield f"its lists of pages count {said} and have {num}, all of which are read"
    elif unread := found.get("unread", 0):
        yield f"its lists of pages count {num} and have {num + unread}: the last cannot be read"


class Pages(PageParts):
    """The wanted pages of a document. text: of a page. notes: what is told of the document."""

    def __init__(
        self,
        document: _Document,
        options: PDFOptions,
        indexes: Sequence[int],
        sizes: Sequence[Sequence[float]],
        limits: MediaLimits,
        notes: Iterable[str] = (),
    ) -> None:
        super().__init__(indexes)
        self.notes = tuple(notes)
        self._document, self._options = document, options
        self._sizes, self._limits = sizes, limits

    def part(self, place: int) -> SplitPart:
        """Returns a page. Raises MediaError for one whose size cannot be read."""
        index, (width, height) = self.indexes[place], self._sizes[place]
        if not (width > 0 and height > 0):
            raise MediaError(f"page {index + 1} cannot be read; its object is damaged")
        size, turn = self._options.size(width, height), self._options.turn
        source = PageDrawing(self._document, index, size, turn)
        return SplitPart(source=source, label=self.label(place))

    def text(self, place: int) -> str:
        """Returns the text layer of a page, "" for a page that is a picture. Raises MediaError."""
        own = self._document
        [(found, _)] = own.workers.decode(
            f"{LIBRARY}:read_text",
            own.blob,
            self._limits,
            password=own.password,
            page=self.indexes[place],
        )
        return str(found["text"])
