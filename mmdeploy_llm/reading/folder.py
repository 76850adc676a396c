"""Writes the Markdown of pages and documents into a folder, from the records of a run.

FOLDER/sub/report.pdf.md              the document: its pages in order
FOLDER/sub/report.pdf.pages/0003.md   a page
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.records.files import Folder
from mmdeploy_llm.records.record import Record

from .markup.blocks import comment
from .pages import document_id
from .repeated import mark_running

MAX_NAMED = 20  # pages in a sentence, documents in a summary


@dataclass(slots=True, kw_only=True)
class FolderCounts:
    """Counts what was written; filled by write_folder. incomplete: what is told of documents."""

    num_documents: int = 0
    num_pages: int = 0
    num_marked: int = 0
    incomplete: list[str] = field(default_factory=list)

    def lines(self, folder: Path) -> list[str]:
        """Returns what a summary says."""
        num = self.num_documents
        documents = f"{num} document{'' if num == 1 else 's'}"
        found = [f"markdown: {self.num_pages} pages of {documents} in {folder}"]
        if self.num_marked:
            found.append(
                f"  {self.num_marked} running headers and footers are comments now "
                "(--running keep leaves them)"
            )
        found += [f"  {words}" for words in self.incomplete[:MAX_NAMED]]
        if (more := len(self.incomplete) - MAX_NAMED) > 0:
            found.append(f"  and {more} more, each of which says so in its Markdown")
        return found


def check_folder(folder: Path, *, is_new: bool) -> None:
    """Raises ConfigError for what is no folder, and for one with files where a run is a new one."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--markdown {str(folder)!r} is no folder")
    if is_new and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"--markdown {str(folder)!r} has files; name another folder, or give --resume or "
            "--overwrite"
        )


def write_folder(folder: Path, records: Iterable[Record], *, is_marked: bool) -> FolderCounts:
    """Writes the Markdown of all records. They must come document by document. is_marked: whether
    running headers and footers become comments in documents; pages keep theirs."""
    counts = FolderCounts()
    with Folder.open(folder) as root:
        for document, own in groupby(records, lambda record: document_id(str(record.id))):
            pages = sorted(own, key=_number)
            _write(root, document, pages, counts, is_marked=is_marked)
    return counts


def _number(record: Record) -> int:
    number = record.columns.get("page", 1)
    return number if isinstance(number, int) else 1


def _write(
    root: Folder, document: str, pages: Sequence[Record], counts: FolderCounts, *, is_marked: bool
) -> None:
    *folders, name = _names(document)
    opened = [root]
    try:
        for inner in folders:
            opened.append(opened[-1].inner(inner))
        paged = [record for record in pages if str(record.id) != document]
        if paged:  # a picture is its own page
            with opened[-1].inner(f"{name}.pages") as beside:
                for record in paged:
                    _put(beside, f"{_number(record):04d}.md", page_text(record))
        _put(opened[-1], f"{name}.md", _document(document, pages, counts, is_marked=is_marked))
    finally:
        for own in opened[:0:-1]:
            own.close()
    counts.num_documents += 1
    counts.num_pages += len(pages)


def _names(document: str) -> list[str]:
    """Returns the names of folders and of a file for a document beneath a folder."""
    parts = [part for part in document.split("/") if part not in ("", ".")]
    return ["up" if part == ".." else part for part in parts] or ["document"]


def _put(folder: Folder, name: str, text: str) -> None:
    folder.write(name, [text.encode("utf-8", "replace"), b"\n"], is_synced=False)


def page_text(record: Record) -> str:
    """Returns the Markdown of a page: its text, and what is wrong with it."""
    if not record.is_ok:
        return f"> **Page {_number(record)} could not be read:** {record.error_msg}"
    if record.lack is not None:
        note = f"> **Page {_number(record)} is not complete:** {record.lack}"
        return f"{record.text}\n\n{note}" if record.text else note
    return record.text


def _document(
    document: str, pages: Sequence[Record], counts: FolderCounts, *, is_marked: bool
) -> str:
    texts = tuple(page_text(record) for record in pages)
    if is_marked:
        marked = mark_running(
            [record.text if record.is_ok else "" for record in pages],
            [_number(record) for record in pages],
        )
        counts.num_marked += marked.num_marked
        texts = tuple(
            page_text(record) if not record.is_ok else text + page_text(record)[len(record.text) :]
            for record, text in zip(pages, marked.pages, strict=True)
        )
    head = list(_incomplete(document, pages, counts))
    if len(pages) == 1:
        return "\n\n".join([*head, *texts])
    blocks = (
        f"{comment(f'page {_number(record)}')}\n\n{text}"
        for record, text in zip(pages, texts, strict=True)
    )
    return "\n\n".join([*head, *blocks])


def _incomplete(document: str, pages: Sequence[Record], counts: FolderCounts) -> Iterator[str]:
    """Yields what stands before a document that lacks pages, and tells it."""
    failed = [_number(record) for record in pages if not record.is_ok]
    lacking = [_number(record) for record in pages if record.is_ok and record.lack is not None]
    total = max((_total(record) for record in pages), default=0)
    for numbers, words in ((failed, "could not be read"), (lacking, "not complete")):
        if numbers:
            told = f"{len(numbers)} of {total} pages {words}: {_listed(numbers)}"
            counts.incomplete.append(f"{document}: {told}")
            yield f"> **{told}**"


def _total(record: Record) -> int:
    total = record.columns.get("pages", 1)
    return total if isinstance(total, int) else 1


def _listed(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:MAX_NAMED]))
    return named if len(numbers) <= MAX_NAMED else f"{named} and {len(numbers) - MAX_NAMED} more"
