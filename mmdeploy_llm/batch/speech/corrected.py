"""Writes texts and WebVTT again from subtitles that a person has corrected; no model is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.claims import claimed

from .joining import Line
from .plan import Task, plan
from .writing import FORMATS, WORD_JOINER, write

SOURCE, TARGETS = "srt", ("txt", "vtt")
_TIME = r"(\d+):(\d\d):(\d\d)[,.](\d{3})"
_TIMES = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """A file of subtitles, with the transcripts that were written from it, or with an error."""

    path: Path
    written: tuple[str, ...] = ()
    error: str | None = None


def write_corrected(
    sounds: Sequence[str],
    formats: Sequence[str],
    folder: Path | None,
    *,
    is_recursive: bool = True,
    overwrite: bool = False,
) -> Iterator[Corrected]:
    """Yields the subtitles of each sound once its other transcripts say the same. One that was
    changed after the subtitles, and says something else, is an error unless it may be overwritten.
    Raises ConfigError where there are no sounds, and for formats that no subtitles fill."""
    wanted = [name for name in formats if name != SOURCE]
    if not wanted or not {*wanted} <= {*TARGETS}:
        raise ConfigError(
            f"--corrected writes {' and '.join(TARGETS)} from .{SOURCE}, which says no languages "
            f"and words as json does; got --transcripts {','.join(formats)}"
        )
    known = Configuration()  # nothing is asked, so that nothing decides the words
    found = plan(sounds, wanted, folder, known, is_recursive=is_recursive, overwrite=True)
    for task in found.tasks.values():
        path = task.stem.with_name(f"{task.stem.name}.{SOURCE}")
        try:
            with claimed(task.stem):
                written = _write(path, task, overwrite=overwrite)
        except (ConfigError, OSError) as error:
            yield Corrected(path=path, error=str(error))
        else:
            yield Corrected(path=path, written=written)


def _write(path: Path, task: Task, *, overwrite: bool) -> tuple[str, ...]:
    """Writes those transcripts that say something else; returns their names."""
    lines = read_subtitles(path)
    texts = {target: FORMATS[name](lines) for name, target in task.targets.items()}
    others = {target: text for target, text in texts.items() if _text_of(target) != text}
    newer = [own for own in others if own.exists() and own.stat().st_mtime > path.stat().st_mtime]
    if newer and not overwrite:
        raise ConfigError(
            f"{str(newer[0])!r} was changed after these subtitles and says something else; it "
            "stays. --overwrite replaces it"
        )
    for target, text in others.items():
        write(target, text)
    return tuple(target.name for target in others)


def read_subtitles(path: Path) -> list[Line]:
    """Reads SubRip as people edit it: with or without numbers and lines between the blocks. Raises
    ConfigError for a text without times."""
    if not path.is_file():
        raise ConfigError("there are no such subtitles; transcribe writes them first")
    try:
        rows = path.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ConfigError("the subtitles are not UTF-8; save them as UTF-8") from None
    starts = [number for number, row in enumerate(rows) if _TIMES.fullmatch(row)]
    before = "".join(rows[: starts[0] if starts else None]).strip()
    if before and not before.isdigit():
        raise ConfigError(
            f"the subtitles begin with {before[:40]!r}; a text stands after a line with its times, "
            "00:00:01,500 --> 00:00:03,000"
        )
    return [_line(rows[start:end]) for start, end in pairwise([*starts, len(rows)])]


def _line(rows: Sequence[str]) -> Line:
    """Returns a block as a line. rows: its times, its text, and perhaps the next one's number."""
    found = _TIMES.fullmatch(rows[0])
    assert found is not None
    begin, end = (_seconds(found.groups()[at : at + 4]) for at in (0, 4))
    texts = list(rows[1:])
    if len(texts) > 1 and texts[-1].strip().isdigit() and not texts[-2].strip():
        texts.pop()
    return Line(start=begin, end=end, text=" ".join(texts).replace(WORD_JOINER, ""))


def _seconds(parts: Sequence[str]) -> float:
    hours, minutes, seconds, millis = map(int, parts)
    return hours * 3600 + minutes * 60 + seconds + millis / 1000


def _text_of(path: Path) -> str | None:
    return path.read_text("utf-8", errors="replace") if path.is_file() else None
