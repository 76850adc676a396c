"""The outcome of an item in one word, also of a record that was written before records had one."""

from __future__ import annotations

from .record import Record

OUTCOMES = ("ok", "empty", "truncated", "repetition", "failed")
NO_ANSWER = frozenset(("empty", "repetition", "failed"))


def outcome_of(record: Record) -> str:
    """Returns the outcome of an item."""
    known = getattr(record, "outcome", None)
    if known:
        return str(known)
    if not record.is_ok:
        return "failed"
    if not record.text and not record.tool_calls:
        return "empty"
    return {"length": "truncated", "repetition": "repetition"}.get(record.finish_reason or "", "ok")
