"""Tells in which encoding a text is that is not UTF-8, so that whoever has it can convert it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

MIN_SHARE = 0.8  # of the characters beyond ASCII, those that are usual in Chinese


def not_utf8(text: bytes | str) -> str:
    """Returns "not UTF-8", and what the text seems to be: UTF-16, as spreadsheets save "Unicode
    text", or GBK. text: a whole text or a line, as bytes or decoded with `surrogateescape`."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data:
        return _converted("UTF-16")
    return _converted("GB18030") if is_gbk(data) else "not UTF-8; convert it to UTF-8"


def is_utf8(text: str) -> bool:
    """Says whether a text that was decoded with `surrogateescape` was UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_gbk(data: bytes) -> bool:
    """Says whether bytes look like Chinese in GBK: most characters beyond ASCII are punctuation or
    the frequent ones of GB 2312. Latin, Cyrillic and Greek letters make rare ones."""
    try:
        text = data.decode("gb18030")
    except UnicodeDecodeError:
        return False
    leads = list(_leads(text))
    usual = sum(0xB0 <= lead <= 0xD7 or 0xA1 <= lead <= 0xA3 for lead in leads)
    return bool(leads) and usual >= MIN_SHARE * len(leads)


def _leads(text: str) -> Iterable[int]:
    for char in text:
        if not char.isascii():
            coded = char.encode("gb18030")
            yield coded[0] if len(coded) == 2 and coded[1] >= 0xA1 else 0


def _converted(name: str) -> str:
    return f"not UTF-8, it seems to be {name}; convert it: iconv -f {name} -t UTF-8 FILE > NEW"
