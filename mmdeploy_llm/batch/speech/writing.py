"""Writes transcripts: SubRip and WebVTT subtitles, plain text, and JSON."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mmdeploy_llm.errors import ConfigError

from .joining import Line
from .line_words import TimedWord

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
    """Returns WebVTT. Its text has three characters with a meaning, which are escaped; before a
    word stands the time at which it is spoken, where that is told."""
    blocks = (
        f"{_span(line, '.')}\n{_escaped(mark)}{_timed(line, text)}\n"
        for line, mark, text in _parts(lines)
    )
    return "\n".join(("WEBVTT\n", *blocks))


def txt(lines: Sequence[Line]) -> str:
    """Returns the texts, each on a line."""
    return "".join(f"{text}\n" for _, text in _marked(lines))


def as_json(lines: Sequence[Line]) -> str:
    """Returns a list of {start, end, text, language, speaker, doubtful}, times in seconds, and
    words, a list of {word, start, end, probability}, where they are told."""
    rows: list[dict[str, object]] = [
        {
            "start": round(line.start, 3),
            "end": round(line.end, 3),
            "text": text,
            "language": line.language,
            "speaker": line.speaker,
            "doubtful": line.is_doubtful,
            **({"words": [_row(word) for word in shown_words(line, text)]} if line.words else {}),
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
        if text := shown(line.text):
            yield line, text


def shown(text: str) -> str:
    """Returns a text as _texts yields it."""
    text = "".join(" " if one.isspace() else one for one in text)
    text = "".join(one for one in text if unicodedata.category(one) != "Cc")
    return " ".join(text.split())


def _marked(lines: Sequence[Line]) -> Iterator[tuple[Line, str]]:
    """Yields lines with their texts, before them the speaker, where one is known, and DOUBT where
    perhaps nobody said it. Programs that read subtitles drop the voices of WebVTT."""
    for line, mark, text in _parts(lines):
        yield line, f"{mark}{text}"


def _parts(lines: Sequence[Line]) -> Iterator[tuple[Line, str, str]]:
    """Yields lines with what stands before their texts, and these."""
    for line, text in _texts(lines):
        speaker = f"{line.speaker}: " if line.speaker is not None else ""
        yield line, f"{speaker}{DOUBT} " if line.is_doubtful else speaker, text


def shown_words(line: Line, text: str) -> Iterator[TimedWord]:
    """Yields the words of a line with the characters of its text as it is written, all of them."""
    at, words = 0, [word for word in line.words if shown(word.text)]
    for number, word in enumerate(words):
        end, left = at, len(shown(word.text).replace(" ", ""))
        while end < len(text) and left:
            left -= text[end] != " "
            end += 1
        end = len(text) if number + 1 == len(words) else end
        yield replace(word, text=text[at:end])
        at = end


def _row(word: TimedWord) -> dict[str, object]:
    sure = word.probability
    return {
        "word": word.text,
        "start": round(word.start, 3),
        "end": round(word.end, 3),
        "probability": None if sure is None else round(sure, 4),
    }


def _timed(line: Line, text: str) -> str:
    """Returns an escaped text with the time of each word that WebVTT allows one: later than the
    cue's begin and the times before it, earlier than its end."""
    if not line.words:
        return _escaped(text)
    parts, last = list[str](), round(1000 * max(line.start, 0.0))
    end = round(1000 * max(line.end, max(line.start, 0.0) + SHORTEST))
    for word in shown_words(line, text):
        spaces, moment = len(word.text) - len(word.text.lstrip()), round(1000 * word.start)
        if last < moment < end:
            parts.append(f"{word.text[:spaces]}<{_time(moment / 1000, '.')}>")
            last = moment
        else:
            parts.append(word.text[:spaces])
        parts.append(_escaped(word.text[spaces:]))
    return "".join(parts)


def _literal(text: str) -> str:
    """Returns a text as SubRip should show it. It has no escapes: a word joiner, which nobody sees,
    is put into what readers take for tags, line ends or times."""
    return _MARKUP.sub(lambda found: found[0] + WORD_JOINER, text)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
