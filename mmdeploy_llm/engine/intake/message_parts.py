"""Writes texts as parts of messages."""

from __future__ import annotations

from typing import Any


def system_message(text: str | None) -> list[dict[str, Any]]:
    """Returns the messages of an instruction: one, or none for no text."""
    return [{"role": "system", "content": text_parts(text)}] if text else []


def text_parts(text: str | None) -> list[dict[str, Any]]:
    """Returns the parts of a text: one, or none for no text."""
    return [{"type": "text", "text": text}] if text else []
