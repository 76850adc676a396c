"""Goes to a file, and gives one up, for all readers of files in the child."""

from __future__ import annotations

import os
from dataclasses import replace

from mmdeploy_llm.data.rows.files import File
from mmdeploy_llm.data.rows.lines import unreadable

from .places import Cursor, Piece, Place

REMOTE_BYTES = 2**33  # of a file that is elsewhere, whose size is not asked for


def size_of(file: File) -> int:
    """Returns the size of a file in bytes. Raises OSError when it is gone."""
    return REMOTE_BYTES if file.is_remote else os.path.getsize(file.path)


def enter_file(cursor: Cursor, number: int, file: File) -> Piece:
    """Goes to a file, before it is opened."""
    here = cursor.now
    if here.file != number:
        cursor.now = Place(file=number, line=here.line)
    return cursor.enter(file.name, lost=Place(file=number + 1, line=here.line + 1))


def lose_file(cursor: Cursor, file: File, error: Exception | str) -> Piece:
    """Gives up what is left of a file: one error."""
    bad = unreadable(file, cursor.now.line, error)
    now = Place(file=cursor.now.file + 1, line=bad.line + 1)
    piece = cursor.enter(file.name, lost=now)
    cursor.now = now
    is_wanted = cursor.lines.takes(bad.line)
    return replace(piece, now=now, faults=(bad,) if is_wanted else ())
