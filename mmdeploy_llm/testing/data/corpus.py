"""Checks of a format of corpora: what its reader yields, of good files and of damaged ones."""

from __future__ import annotations

import datetime
import decimal
import gc
import os
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from mmdeploy_llm.data.rows.rows import BadItem, table_row
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.testing.models.base import Check, CheckFailed, CheckSkipped, attributed, demand

from .corpus_subject import CorpusSubject, Opened, Values
from .cutting import Cuts

NUM_CUTS = 16
MAX_BYTES = 10_000  # of a value, where that is tried
BIG_ROWS, BIG_TEXT = 2_000, 10_000  # rows of a big file, characters of each
FEW_ROWS = 3  # read of it
ENDED = "the process that reads it"  # begins what is said of one that died
URL = "s3://bucket/sample"
DAY = datetime.datetime(2024, 2, 29, 23, 59, 59, 999_999)
# What a row may hold; a format that cannot store one refuses it, and `values` says what it stores.
VALUES: Values = {
    "a text": "K\u00f6ln \U0001f600 \t'\"\\ | , ;",
    "lines": "one\ntwo\r\nthree\n",
    "no text": "",
    "nothing": None,
    "true": True,
    "zero": 0,
    "a large number": 2**62 + 1,
    "a negative one": -(2**40),
    "a float": 0.1,
    "a small float": 5e-324,
    "bytes": bytes(range(256)),
    "a list": [1, "two", None],
    "a mapping": {"a": {"b": [1]}},
    "a date": DAY.date(),
    "a moment": DAY,
    "a moment in UTC": DAY.replace(tzinfo=datetime.UTC),
    "a time": DAY.time(),
    "a decimal": decimal.Decimal("12345678901234567890.10"),
}
FOREIGN: Mapping[str, bytes] = {  # what first bytes must not take
    "a PNG image": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "a JPEG image": b"\xff\xd8\xff\xe0\0\x10JFIF\0",
    "a WAV file": b"RIFF\x24\0\0\0WAVEfmt ",
    "JSON lines": b'{"id": "a", "prompt": "Say hello."}\n',
    "a CSV table": b"id,prompt\na,Say hello.\n",
    "a Parquet file": b"PAR1\x15\x04\x15",
    "a text": b"Hello, world.\n",
    "a PDF": b"%PDF-1.7\n",
}
HOSTILE: Mapping[str, bytes] = {  # content that is none of the format, most likely
    "an empty file": b"",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "noise": bytes((31 * n * n + 7 * n) % 251 for n in range(4096)),
    "brackets": b"[{(<" * 50_000,
    "lines without content": b"\n" * 4096,
}


def suffixes_and_first_bytes_fit(subject: CorpusSubject) -> None:
    """First bytes are those of all samples, and of no other usual format."""
    begins = [it if isinstance(it, tuple) else (0, it) for it in subject.spec.first_bytes]
    for what, content in FOREIGN.items():
        taken = [begin for at, begin in begins if content.startswith(begin, at)]
        demand(not taken, f"first_bytes {taken!r} also begin {what}; declare more bytes, or none")
    if begins and subject.samples:
        for name, content in subject.contents().items():
            is_found = any(content.startswith(begin, at) for at, begin in begins)
            demand(
                is_found,
                f"sample {name!r} begins with {content[:16]!r}, which no first_bytes have; declare "
                "what all files of the format begin with",
            )


def rows_are_those_of_the_files(subject: CorpusSubject) -> str | None:
    """The reader yields the rows of each sample; where `rows` says them, exactly these."""
    found = {name: subject.good(name, content) for name, content in subject.contents().items()}
    for name, rows in subject.rows.items():
        if name not in found:
            raise CheckFailed(f"`rows` has {name!r}, which `samples` does not have")
        _demand_rows(name, found[name], rows)
    empty = [name for name, rows in found.items() if not rows and name not in subject.rows]
    demand(not empty, f"samples {empty} have no rows; give files with some")
    without = [name for name in found if name not in subject.rows]
    return f"add `rows` of {', '.join(without)} to have values compared" if without else None


def the_same_rows_each_time(subject: CorpusSubject) -> None:
    """Two readings of a file at the same time, one that was given up before, and one by a process
    of its own yield equal rows: a run that is resumed counts on it."""
    contents = subject.contents()
    for name, content in contents.items():
        first = subject.good(name, content)
        file = subject.opening(content)
        with attributed(f"reading {name} while it is read again", "share nothing among readers"):
            between = iter(subject.reader(file.corpus_file))
            begun = [subject.plain(name, row) for row in islice(between, 1)]
            again = subject.good(name, content)
            begun += [subject.plain(name, row) for row in between]
        told = "keep no state in the module, and sort what has no order"
        demand(again == first, f"{name}: {_difference(first, again)} {told} (it was read twice)")
        demand(
            begun == first,
            f"{name}: {_difference(first, begun)} {told} (it was read between)",
        )
    apart = subject.batch_rows(contents)
    bad = [row.message for row in apart if isinstance(row, BadItem)]
    demand(not bad, f"in a process of its own a row is an error: {bad[:1]}; see the message")
    whole = [_like_a_batch(row) for name in contents for row in subject.good(name, contents[name])]
    demand(
        len(apart) == len(whole) and all(map(_same, whole, apart)),
        f"{_difference(whole, apart)} in another process: the order of a set, the time and random "
        "numbers are others there",
    )


def files_are_closed(subject: CorpusSubject) -> None:
    """Files are closed when the reader ends, and when nobody wants further rows."""
    for name, content in subject.contents().items():
        for most in (1, None):
            file = subject.opening(content)
            rows = iter(subject.reader(file.corpus_file))
            for _ in islice(rows, most):
                pass
            _close(rows)
            num_open = file.num_open
            file.close()
            demand(
                not num_open,
                f"{name}: {num_open} files are open after "
                f"{'the last row' if most is None else 'the reader was closed'}; use "
                "`with file.open() as content:` around the loop that yields",
            )


def names_are_no_promise(subject: CorpusSubject) -> str | None:
    """A file that only `file.open` can open, such as one at a URL, is read, or refused with an
    exception; a packed one (.gz) too."""
    for name, content in subject.contents().items():
        first = subject.good(name, content)
        path = subject.folder / f"url{subject.suffix}"
        path.write_bytes(content)
        found, error = subject.opened(f"{name} at a URL", Opened(path, URL + subject.suffix))
        if error is not None:
            return f"files at URLs are refused ({error_text(error)}); `file.open()` would read them"
        demand(
            found == first,
            f"{name}: {_difference(first, found)} its path is a URL here: read from `file.open()`",
        )
    return None


def a_damaged_row_costs_itself(subject: CorpusSubject) -> None:
    """A row that is damaged becomes a DamagedRow, and the rows after it come."""
    if not subject.damaged:
        raise CheckSkipped(
            "no damaged files were given; add some to `damaged`, name -> (bytes, rows), with None "
            "for the row that is a DamagedRow, where the format lets one go on after damage"
        )
    for name, (content, rows) in subject.damaged.items():
        found, error = subject.read(name, content)
        demand(
            error is None,
            f"{name}: the reader raised {'' if error is None else error_text(error)} after "
            f"{len(found)} rows; yield a DamagedRow(message=...) in place of the row, and go on",
        )
        _demand_rows(name, found, rows)


def cut_files_end(subject: CorpusSubject) -> None:
    """A file that is cut off ends with an exception or a DamagedRow, after rows of its own: each
    loss is told, wherever the file is cut but between two rows."""
    for name, content in subject.contents().items():
        cuts, places = Cuts(subject, name, content), list(_cuts(content))
        for at in places:
            cuts.check(at)
        for at in cuts.after_rows(places)[:NUM_CUTS]:
            cuts.check(at)


def hostile_files_end(subject: CorpusSubject) -> None:
    """A file of another format ends in an error or in rows, in seconds, and the process that reads
    it lives."""
    for row in subject.batch_rows(dict(HOSTILE)):
        died = isinstance(row, BadItem) and ENDED in row.message
        demand(
            not died,
            f"a file of {', '.join(HOSTILE)} ended the process: {getattr(row, 'message', '')}; "
            "raise an exception instead",
        )


def values_survive(subject: CorpusSubject) -> str | None:
    """Texts, numbers, bytes, dates, decimals, lists and mappings come as they were written."""
    values = VALUES if subject.values is None else subject.values
    refused = []
    for what, value in values.items():
        try:
            with subject.written([{"id": "a", subject.column: value}]) as path:
                rows = subject.good(what, path)
        except CheckFailed as failure:
            if subject.values is None and "write(path, rows)" in str(failure):
                refused.append(what)
                continue
            raise
        found = rows[0].get(subject.column) if rows else None
        demand(
            len(rows) == 1 and _same(found, value),
            f"{what} was written as {value!r:.80} and read as {found!r:.80}; keep the value and "
            "its type, or say in `values` what the format can hold",
        )
    demand(len(refused) < len(values), f"write(path, rows) refuses all of {', '.join(values)}")
    return f"not stored by `write`: {', '.join(refused)}" if refused else None


def large_values_cost_their_row(subject: CorpusSubject) -> None:
    """A value over the limit of bytes is an error of its row; the rows around it come."""
    sizes = (10, MAX_BYTES + 1, 10)
    values = VALUES if subject.values is None else subject.values
    if not any(isinstance(value, bytes) for value in values.values()):
        raise CheckSkipped("the format holds no bytes (`values`), and only these have a limit")
    made = [{"id": str(n), subject.column: b"x" * size} for n, size in enumerate(sizes)]
    with subject.written(made) as path:
        rows = subject.batch_rows({"large": path.read_bytes()}, MAX_BYTES)
    kinds = [isinstance(row, BadItem) for row in rows]
    demand(
        kinds == [False, True, False],
        f"of values with {sizes} bytes and max_bytes={MAX_BYTES} came {len(rows)} rows, "
        f"{sum(kinds)} of them errors; yield a DamagedRow for a value over file.max_bytes, or the "
        "value itself, and go on",
    )


def big_files_are_read_as_they_are_wanted(subject: CorpusSubject) -> None:
    """The first rows of a big file come before the rest of it is read."""
    size = BIG_ROWS * BIG_TEXT
    values = VALUES if subject.values is None else subject.values
    is_text = any(isinstance(value, str) for value in values.values())
    texts = (chr(97 + n % 26) * BIG_TEXT for n in range(BIG_ROWS))
    made = (
        {"id": str(n), subject.column: text if is_text else text.encode()}
        for n, text in enumerate(texts)
    )
    with subject.written(made) as path:
        on_disk = os.path.getsize(path)
        file = Opened(path)
        gc.collect()
        tracemalloc.start()
        try:
            rows = iter(subject.reader(file.corpus_file))
            num_rows = sum(1 for _ in islice(rows, FEW_ROWS))
            taken = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        _close(rows)
        file.close()
    demand(num_rows == FEW_ROWS, f"a file of {BIG_ROWS} rows has {num_rows}")
    demand(
        taken < size // 4 and (file.num_read < on_disk // 4 or on_disk < size // 4),
        f"for {FEW_ROWS} rows of a file with {size >> 20} MiB of texts, {file.num_read >> 10} KiB "
        f"were read and {taken >> 20} MiB taken; read and yield one row after the other",
    )


CHECKS: tuple[Check, ...] = (
    suffixes_and_first_bytes_fit,
    rows_are_those_of_the_files,
    the_same_rows_each_time,
    files_are_closed,
    names_are_no_promise,
    a_damaged_row_costs_itself,
    cut_files_end,
    hostile_files_end,
    values_survive,
    large_values_cost_their_row,
    big_files_are_read_as_they_are_wanted,
)


def _close(rows: Any) -> None:
    """Closes a reader that is a generator, as a batch does."""
    close = getattr(rows, "close", None)
    if close is not None:
        close()


def _cuts(content: bytes) -> Iterator[int]:
    yield from sorted({len(content) * step // NUM_CUTS for step in range(1, NUM_CUTS)} - {0})
    if len(content) > 1:
        yield len(content) - 1


def _demand_rows(name: str, found: Sequence[Values | None], rows: Sequence[Values | None]) -> None:
    is_same = len(found) == len(rows) and all(map(_same, found, rows))
    demand(is_same, f"{name}: {_difference(rows, found)} correct the reader, or what is expected")


def _difference(first: Sequence[Any], again: Sequence[Any]) -> str:
    """Says where two lists of rows differ."""
    for number, (one, two) in enumerate(zip(first, again, strict=False), 1):
        if not _same(one, two):
            return f"row {number} is {_shown(two)}, not {_shown(one)};"
    return f"there are {len(again)} rows, not {len(first)};"


def _shown(row: Any) -> str:
    if row is None:
        return "a DamagedRow"
    return f"{dict(row)!r:.100}" if isinstance(row, Mapping) else f"{row!r:.100}"


def _same(one: Any, two: Any) -> bool:
    """Whether values are equal and of one type: True is not 1."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return one.keys() == two.keys() and all(_same(one[name], two[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, (bytes, bytearray, memoryview)):
        return isinstance(two, (bytes, bytearray, memoryview)) and bytes(one) == bytes(two)
    return type(one) is type(two) and one == two


def _like_a_batch(row: Values) -> Any:
    """Returns the row as a batch has it, which leaves out null fields of mappings."""
    found = table_row(1, {name: _sent(value) for name, value in row.items()})
    return found.message if isinstance(found, BadItem) else found.values


def _sent(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _sent(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sent(own) for own in value]
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else value
