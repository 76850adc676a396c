"""Names and types of options, for editors and type checkers. Written from the fields of the
classes that check them, by tests/test_option_dicts.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import BaseModel


class EarlyStopOptions(TypedDict, total=False):
    """Options of EarlyStopParams."""

    enable_early_stop: bool | None
    threshold: float | None
    window_size: int | None


class GuidedDecodingOptions(TypedDict, total=False):
    """Options of GuidedDecodingParams."""

    choice: Sequence[str] | None
    disable_any_whitespace: bool | None
    grammar: str | None
    json: Mapping[str, Any] | str | type[BaseModel] | None
    json_object: bool | None
    regex: str | None
    structural_tag: Mapping[str, Any] | str | None


class NoRepeatNGramOptions(TypedDict, total=False):
    """Options of NoRepeatNGramParams."""

    may_repeat: str | Sequence[str] | None
    may_repeat_token_ids: int | Sequence[int] | None
    size: int | None
    window: int | None
