"""ColumnArguments: options of calls about columns, which signatures show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class ColumnArguments(TypedDict, total=False):
    """Arguments of `LLM.run_batch` that name columns. media_column: of any kind, {kind: column}, a
    list for several. columns: those that records repeat."""

    image_column: str | None
    video_column: str | None
    audio_column: str | None
    media_column: Mapping[str, str | Sequence[str]]
    prompt_column: str | None
    id_column: str | None
    columns: Sequence[str]
