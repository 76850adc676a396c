"""Neutralises characters that reorder the text around them, where people read untrusted text."""

from __future__ import annotations

# LRE, RLE, PDF, LRO, RLO and LRI, RLI, FSI, PDI: "photo_<RLO>gpj.exe" is shown as "photo_exe.jpg".
# Right-to-left letters and the marks U+200E and U+200F order only themselves and stay.
CONTROLS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_TABLE = dict.fromkeys(CONTROLS, "\ufffd")


def without_bidi_controls(text: str) -> str:
    """Replaces bidirectional embeddings, overrides and isolates by U+FFFD."""
    return text.translate(_TABLE)
