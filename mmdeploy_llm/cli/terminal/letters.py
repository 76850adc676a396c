"""Text without characters that control the terminal. It imports little: the first line of a run
needs it."""

from __future__ import annotations

import unicodedata

from mmdeploy_llm.batch.report.letters import without_bidi_controls


def printable(text: str) -> str:
    """Replaces control characters, so that file names and answers cannot control the terminal or
    the order in which the text around them is shown."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") else "\ufffd"
        for char in without_bidi_controls(text)
    )
