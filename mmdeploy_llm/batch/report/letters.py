"""Finds the language of a text by its letters, and the form in which it is searched."""

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
