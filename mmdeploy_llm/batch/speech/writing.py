"""Writes transcripts: SubRip and WebVTT subtitles, plain text, and JSON."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mmdeploy_llm.errors import ConfigError

from .joining import Line

Write = Callable[[Sequence[Line]], str]
DOUBT = "[?]"
WORD_JOINER = "\u2060"
# "<" of a tag, "{" of an override, a backslash of a line end, minutes of a time.
_MARKUP = re.compile(r"<(?= *\/? *[a-zA-Z])|\{(?=\\)|\\(?=[Nnh])|\d:\d{1,2}:(?=\d{1,2}[.,]\d)")
SHORTEST = 0.1  # seconds of a subtitle: WebVTT has none that ends when it begins


def srt(lines: Sequence[Line]) -> str:
    """Returns SubRip: numbered blocks with times 00:00:01,500."""
    blocks = (
        f"{number}\n{_span(line, ',')}\n{_literal(text)}\n"
        for number, (line, text) in enumerate(_marked(lines), start=1)
    )
    return "\n".join(blocks)


def vtt(lines: Sequence[Line]) -> str:
    """Returns WebVTT. Its text has three characters with a meaning, which are escaped."""
    blocks = (f"{_span(line, '.')}\n{_escaped(text)}\n" for line, text in _marked(lines))
    return "\n".join(("WEBVTT\n", *blocks))


def txt(lines: Sequence[Line]) -> str:
    """Returns the texts, each on a line."""
    return "".join(f"{text}\n" for _, text in _marked(lines))


def as_json(lines: Sequence[Line]) -> str:
    """Returns a list of {start, end, text, language, speaker, doubtful}, times in seconds."""
    rows = [
        {
            "start": round(line.start, 3),
            "end": round(line.end, 3),
            "text": text,
            "language": line.language,
            "speaker": line.speaker,
            "doubtful": line.is_doubtful,
        }
        for line, text in _texts(lines)
    ]
    return json.dumps(rows, ensure_ascii=False, indent=1) + "\n"


FORMATS: Mapping[str, Write] = {"json": as_json, "srt": srt, "txt": txt, "vtt": vtt}


def read_formats(text: str) -> tuple[str, ...]:
    """Returns the names in a text such as "srt,txt". Raises ConfigError for an unknown one."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in FORMATS:
            raise ConfigError(f"--transcripts {name!r:.40} is unknown; known: {', '.join(FORMATS)}")
    if not names:
        raise ConfigError(f"--transcripts needs one of {', '.join(FORMATS)}")
    return names


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all; the caller has claimed it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, "utf-8", newline="\n")
    os.replace(partial, path)


def _span(line: Line, comma: str) -> str:
    start = max(line.start, 0.0)
    return f"{_time(start, comma)} --> {_time(max(line.end, start + SHORTEST), comma)}"


def _time(seconds: float, comma: str) -> str:
    """Returns hours, minutes, seconds and milliseconds."""
    whole, millis = divmod(round(seconds * 1000), 1000)
    minutes, seconds = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{int(seconds):02}{comma}{millis:03}"


def _texts(lines: Sequence[Line]) -> Iterator[tuple[Line, str]]:
    """Yields lines with their texts, without empty lines, which would end a block, and without the
    control characters of broken answers: after a NUL many programs read no further."""
    for line in lines:
        text = "".join(" " if one.isspace() else one for one in line.text)
        text = "".join(one for one in text if unicodedata.category(one) != "Cc")
        if words := text.split():
            yield line, " ".join(words)


def _marked(lines: Sequence[Line]) -> Iterator[tuple[Line, str]]:
    """Yields lines with their texts, before them the speaker, where one is known, and DOUBT where
    perhaps nobody said it. Programs that read subtitles drop the voices of WebVTT."""
    for line, text in _texts(lines):
        speaker = f"{line.speaker}: " if line.speaker is not None else ""
        yield line, f"{speaker}{DOUBT} {text}" if line.is_doubtful else f"{speaker}{text}"


def _literal(text: str) -> str:
    """Returns a text as SubRip should show it. It has no escapes: a word joiner, which nobody sees,
    is put into what readers take for tags, line ends or times."""
    return _MARKUP.sub(lambda found: found[0] + WORD_JOINER, text)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
