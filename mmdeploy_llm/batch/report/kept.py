"""Reads the cards of an earlier page, so that a resumed run need not make them again."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.errors import ConfigError

from .cards import Row
from .target import MARK

MAX_BYTES = 64 * 2**20  # of a page, or of a script of cards
_ARTICLE = re.compile(
    r'<article class="card[^"]*"[^>]* data-key="([0-9a-f]{24})"[^>]*>.*?</article>', re.DOTALL
)
_ATTRIBUTE = re.compile(r' data-(outcome|failure)="([^"]*)"')
_TAG = re.compile(r"<[^>]*>")
_CHUNK = re.compile(r"reportCards\((\[.*\])\);\s*", re.DOTALL)
# No card has these: what somebody else has written into a page is not copied.
_FOREIGN = re.compile(
    r"<(?!/?(?:article|div|img|audio|p|ul|li|span|strong|details|summary)\b)|<[^>]* on\w"
)


def read_kept(parent: Folder, name: str, beside: str) -> Iterator[tuple[str, Row]]:
    """Yields the cards of a page and of the scripts beside it, with their keys. A page that is no
    report, or that is damaged, has none."""
    page = _text(parent, name)
    if MARK.decode() not in page[:4096]:
        return
    for found in _ARTICLE.finditer(page):
        yield from _row(found[1], found[0])
    folder = parent.existing(beside)
    if folder is None:
        return
    with folder:
        for script in filter(re.compile(r"cards-\d{3,}\.js").fullmatch, folder.names()):
            yield from _of_script(_text(folder, script))


def _of_script(text: str) -> Iterator[tuple[str, Row]]:
    chunk = _CHUNK.fullmatch(text)
    try:
        rows = json.loads(chunk[1]) if chunk else []
    except (ValueError, RecursionError):
        return
    for values in rows:
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            found = _ARTICLE.fullmatch(values[-1]) if values else None
            if found is not None:
                yield from _row(found[1], found[0])


def _row(key: str, card: str) -> Iterator[tuple[str, Row]]:
    if _FOREIGN.search(card):
        return
    head = card.partition(">")[0]
    values = {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(head)}
    words = " ".join(html.unescape(_TAG.sub(" ", card)).lower().split())
    yield (
        key,
        Row(
            outcome=values.get("outcome", "ok"),
            failure=values.get("failure", ""),
            words=words,
            html=card,
        ),
    )


def _text(folder: Folder, name: str) -> str:
    try:
        file: FileIO = folder.open_file(Path(name).name, os.O_RDONLY)
    except (OSError, ConfigError):  # what stands there instead is told when the page is written
        return ""
    with file:
        data = file.readall() if os.fstat(file.fileno()).st_size <= MAX_BYTES else b""
    return (data or b"").decode("utf-8", "replace")
