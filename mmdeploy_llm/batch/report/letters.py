"""The letters of a text: its language, the form in which it is searched, and what reorders the text
around it, where people read untrusted text."""

from __future__ import annotations

import re
import unicodedata

KANA = re.compile("[\u3041-\u30ff]")
HANGUL = re.compile("[\uac00-\ud7a3]")
HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af]")


def language(text: str) -> str:
    """Returns "ja", "ko" or "zh", by which a browser chooses the font of characters that they share
    and write differently; "" for a text without these."""
    if KANA.search(text):
        return "ja"
    if HANGUL.search(text):
        return "ko"
    return "zh" if HAN.search(text) else ""


def searched(text: str) -> str:
    """Returns a text in lower case, with full-width letters as usual ones and accents composed, as
    the page's filter does with the words that it looks for."""
    return unicodedata.normalize("NFKC", text).lower()


# LRE, RLE, PDF, LRO, RLO and LRI, RLI, FSI, PDI: "photo_<RLO>gpj.exe" is shown as "photo_exe.jpg".
# Right-to-left letters and the marks U+200E and U+200F order only themselves and stay.
CONTROLS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_TABLE = dict.fromkeys(CONTROLS, "\ufffd")


def without_bidi_controls(text: str) -> str:
    """Replaces bidirectional embeddings, overrides and isolates by U+FFFD."""
    return text.translate(_TABLE)
