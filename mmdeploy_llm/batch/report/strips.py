"""Strips: items beside those that are nearest to them, as small pictures or the start of a text."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mmdeploy_llm.data.records.record import Record

from .pictures import JPEG, Pictures, printable
from .previews import is_refused, media_of

MAX_TEXT = 160  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A record, and how near it is to the first one of its strip; None: it is the first."""

    record: Record
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thumb:
    """An item in a strip. source: URL of its picture, "" without one. text: the start of its
    text."""

    name: str
    title: str
    source: str
    text: str
    score: float | None


Strips = Sequence[Sequence[Near]]


def thumbs_of(strips: Strips, pictures: Pictures, roots: Collection[str] = ()) -> list[list[Thumb]]:
    """Returns strips with their pictures. roots: see media_of."""
    return [[_thumb(own, pictures, roots) for own in strip] for strip in strips]


def _thumb(own: Near, pictures: Pictures, roots: Collection[str]) -> Thumb:
    record = own.record
    shown = () if is_refused(record) else media_of(record, roots)
    found = [each for media in shown for each in pictures.of(media) if each.form == JPEG]
    title = printable(record.key if record.path is None else record.path)
    return Thumb(
        name=os.path.basename(title),
        title=title,
        source=found[0].source if found else "",
        text=" ".join((record.prompt or "").split())[:MAX_TEXT],
        score=own.score,
    )
