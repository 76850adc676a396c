"""Writes the Markdown of pages and documents into a folder, from the records of an output.

FOLDER/sub/report.pdf.md              the document: its pages in order
FOLDER/sub/report.pdf.pages/0003.md   a page
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from mmdeploy_llm.batch.documents.pages import counted
from mmdeploy_llm.data.files.page_choice import document_id, page_of
from mmdeploy_llm.data.outputs.base import Sink
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.claims import claimed

from .continued import join_tables
from .markup.blocks import comment
from .repeated import mark_running

MAX_NAMED = 20  # pages in a sentence, documents in a summary
PAGE_FILE = re.compile(r"\d{4,9}\.md")


@dataclass(slots=True, kw_only=True)
class FolderCounts:
    """Counts what was written and removed; filled by write_folder and remove_documents.
    incomplete: what is told of documents."""

    num_documents: int = 0
    num_pages: int = 0
    num_marked: int = 0
    num_joined: int = 0
    num_removed: int = 0
    incomplete: list[str] = field(default_factory=list)

    def lines(self, folder: Path) -> list[str]:
        """Returns what a summary says."""
        pages, documents = counted(self.num_pages, "page"), counted(self.num_documents, "document")
        found = [f"markdown: {pages} of {documents} in {folder}"]
        if self.num_marked:
            words = (
                "header or footer is a comment"
                if self.num_marked == 1
                else ("headers and footers are comments")
            )
            found.append(f"  {self.num_marked} running {words} now (--running keep leaves them)")
        if self.num_joined:
            parts = counted(self.num_joined, "part")
            verb = "stands" if self.num_joined == 1 else "stand"
            found.append(
                f"  {parts} of tables over pages {verb} with the first (pages keep theirs)"
            )
        if self.num_removed:
            files = counted(self.num_removed, "file")
            found.append(f"  removed {files} of documents and pages that are gone")
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


def newest_records(
    sink: Sink, rank_of: Callable[[Record], tuple[int, int] | None]
) -> Iterator[Record]:
    """Yields the newest records of an output, those of earlier runs too, by their ranks. rank_of:
    None for a record that is left out."""
    places: dict[str, tuple[tuple[int, int], int]] = {}
    for entry in sink.entries():
        rank = rank_of(entry.record)
        if rank is not None:
            places[entry.record.key] = (rank, entry.begin)
    return sink.records_at([begin for _, begin in sorted(places.values())])


def write_folder(folder: Path, records: Iterable[Record], *, is_marked: bool) -> FolderCounts:
    """Writes the Markdown of all records. They must come document by document. is_marked: whether
    running headers and footers become comments in documents; pages keep theirs. Files of pages
    that the records do not have are removed: of a document that was longer."""
    counts = FolderCounts()
    with claimed(folder, is_folder=True), Folder.open(folder) as root:
        for document, own in groupby(records, lambda record: document_id(str(record.id))):
            pages = sorted(own, key=lambda record: page_of(str(record.id)))
            _write(root, document, pages, counts, is_marked=is_marked)
    return counts


def remove_documents(folder: Path, documents: Iterable[str], counts: FolderCounts) -> None:
    """Removes the Markdown of these documents, and no other file."""
    if not folder.is_dir():
        return
    with Folder.open(folder) as root:
        for document in documents:
            *folders, name = _names(document)
            with ExitStack() as stack:
                inner: Folder | None = root
                for own in folders:
                    inner = None if inner is None else inner.existing(own)
                    if inner is not None:
                        stack.enter_context(inner)
                if inner is not None:
                    _remove(inner, f"{name}.md", counts)
                    _keep_pages(inner, name, (), counts)


def _remove(folder: Folder, name: str, counts: FolderCounts) -> None:
    if name in folder.states():
        folder.remove(name)
        counts.num_removed += 1


def _keep_pages(folder: Folder, name: str, kept: Sequence[str], counts: FolderCounts) -> None:
    """Removes the files of a document's pages but those that are kept, and the folder without
    any."""
    beside = folder.existing(f"{name}.pages")
    if beside is None:
        return
    with beside:
        for own in beside.states():
            if PAGE_FILE.fullmatch(own) and own not in kept:
                _remove(beside, own, counts)
    with suppress(OSError):  # it has other files
        if not kept:
            folder.remove_folder(f"{name}.pages")


def _write(
    root: Folder, document: str, pages: Sequence[Record], counts: FolderCounts, *, is_marked: bool
) -> None:
    *folders, name = _names(document)
    paged = {f"{page_of(str(own.id)):04d}.md": own for own in pages if str(own.id) != document}
    with ExitStack() as stack:
        inner = root
        for own in folders:
            inner = stack.enter_context(inner.inner(own))
        if paged:  # a picture is its own page
            with inner.inner(f"{name}.pages") as beside:
                for own, record in paged.items():
                    _put(beside, own, page_text(record))
        _keep_pages(inner, name, tuple(paged), counts)
        _put(inner, f"{name}.md", _document(document, pages, counts, is_marked=is_marked))
    counts.num_documents += 1
    counts.num_pages += sum(not _is_unopened(record) for record in pages)


def _names(document: str) -> list[str]:
    """Returns the names of folders and of a file for a document beneath a folder."""
    parts = [part for part in document.split("/") if part not in ("", ".")]
    return ["up" if part == ".." else part for part in parts] or ["document"]


def _put(folder: Folder, name: str, text: str) -> None:
    folder.write(name, [text.encode("utf-8", "replace"), b"\n"], is_synced=False)


def _is_unopened(record: Record) -> bool:
    """Whether a record says that its document cannot be opened."""
    return not record.is_ok and "page" not in record.columns


def page_text(record: Record) -> str:
    """Returns the Markdown of a page: its text, and what is wrong with it."""
    own = str(record.id)
    name = "The picture" if own == document_id(own) else f"Page {page_of(own)}"
    if record.error is not None:
        what = (
            "The document cannot be opened" if _is_unopened(record) else f"{name} could not be read"
        )
        return f"> **{what}:** {record.error.message}"
    if record.lack is not None:
        note = f"> **{name} is not complete:** {record.lack}"
        return f"{record.text}\n\n{note}" if record.text else note
    return record.text


def _document(
    document: str, pages: Sequence[Record], counts: FolderCounts, *, is_marked: bool
) -> str:
    numbers = [page_of(str(record.id)) for record in pages]
    own = tuple(record.text if record.is_ok else "" for record in pages)
    if is_marked:
        marked = mark_running(own, numbers)
        counts.num_marked += marked.num_marked
        own = marked.pages
    joined = join_tables(own, numbers)
    counts.num_joined += joined.num_joined
    texts = tuple(
        page_text(record) if not record.is_ok else text + page_text(record)[len(record.text) :]
        for record, text in zip(pages, joined.pages, strict=True)
    )
    head = [f"> **{told}**" for told in _incomplete(document, pages, counts)]
    if len(pages) == 1:
        return "\n\n".join([*head, *texts])
    blocks = (
        text if _is_unopened(record) else f"{comment(f'page {page_of(str(record.id))}')}\n\n{text}"
        for record, text in zip(pages, texts, strict=True)
    )
    return "\n\n".join([*head, *blocks])


def _incomplete(document: str, pages: Sequence[Record], counts: FolderCounts) -> Iterator[str]:
    """Tells what a document lacks, and yields what stands before it: of single items nothing."""
    for record in pages:
        if str(record.id) == document and (not record.is_ok or record.lack is not None):
            words = page_text(record)[len(record.text) :].strip().lstrip("> ").replace("**", "")
            counts.incomplete.append(f"{document}: {' '.join(words.split())}")
    paged = [record for record in pages if str(record.id) != document]
    failed = [page_of(str(record.id)) for record in paged if not record.is_ok]
    lacking = [page_of(str(own.id)) for own in paged if own.is_ok and own.lack is not None]
    total = max((_total(record) for record in pages), default=0)
    for numbers, words in ((failed, "could not be read"), (lacking, "not complete")):
        if numbers:
            told = f"{len(numbers)} of {counted(total, 'page')} {words}: {_listed(numbers)}"
            counts.incomplete.append(f"{document}: {told}")
            yield told


def _total(record: Record) -> int:
    total = record.columns.get("pages", 1)
    return total if isinstance(total, int) else 1


def _listed(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:MAX_NAMED]))
    return named if len(numbers) <= MAX_NAMED else f"{named} and {len(numbers) - MAX_NAMED} more"
