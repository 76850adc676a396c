"""CorpusSubject: a format of corpora as its checks see it, read here and in its own process."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, BinaryIO

from mmdeploy_llm.data.rows.files import File
from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.data.rows.packed import open_content
from mmdeploy_llm.data.rows.rows import MAX_CELL_BYTES, BadItem, FirstLines
from mmdeploy_llm.hooks import CorpusFile, CorpusFormatSpec, DamagedRow
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.files import load_named
from mmdeploy_llm.hooks.kinds import table_of
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS, PluginOrigin, Provided
from mmdeploy_llm.system.processes import finalize_here
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped, attributed, demand
from mmdeploy_llm.testing.plugins.bounded import bounded

BUFFER_BYTES = 2**16
SECONDS = 20.0  # until which reading a small file must have ended
ALL = FirstLines(count=10**9)
Values = Mapping[str, Any]
Write = Callable[[Path, Iterable[Values]], object]
# What the reader has yielded: the values of a row, None for a DamagedRow.
Read = list[Values | None]


@dataclass(kw_only=True)
class CorpusSubject:
    """A format to check; see CorpusFormatConformance for the fields. file: of a plugin that is a
    single file."""

    spec: CorpusFormatSpec
    file: Path | None = None
    samples: Mapping[str, bytes | Path] = field(default_factory=dict)
    rows: Mapping[str, Sequence[Values]] = field(default_factory=dict)
    damaged: Mapping[str, tuple[bytes, Sequence[Values | None]]] = field(default_factory=dict)
    write: Write | None = None
    values: Values | None = None
    column: str = "value"

    @cached_property
    def provided(self) -> Provided[CorpusFormatSpec]:
        """The spec with the file of its plugin."""
        name = self.file.name if self.file is not None else self.spec.name
        module = self.spec.reader.partition(":")[0]
        origin = PluginOrigin(name=name, module=module, file=self.file)
        return Provided(spec=self.spec, origin=origin)

    @cached_property
    def reader(self) -> Callable[[CorpusFile], Iterable[Any]]:
        """The reader. Raises CheckFailed when it cannot be imported."""
        with attributed(
            f"importing the reader {self.spec.reader!r}",
            'correct the spec\'s `reader` ("module:function"), or the module',
        ):
            if self.file is not None:
                load_named(self.file, self.spec.reader.partition(":")[0])
            found = imported(self.spec.reader)
        demand(
            callable(found), f"{self.spec.reader!r} is a {type(found).__name__}; name a function"
        )
        return found  # type: ignore[no-any-return]

    def contents(self) -> dict[str, bytes]:
        """Returns the content of each sample. Raises CheckSkipped when there are none."""
        if not self.samples:
            raise CheckSkipped(
                "no files of the format were given; add some to `samples`, name -> bytes "
                "(CorpusFormatConformance)"
            )
        return {
            name: found if isinstance(found, bytes) else Path(found).read_bytes()
            for name, found in self.samples.items()
        }

    @contextmanager
    def written(self, rows: Iterable[Values]) -> Iterator[Path]:
        """Yields a file that the author's `write` has made. Raises CheckSkipped without one."""
        if self.write is None:
            raise CheckSkipped(
                "only a file of chosen rows shows this; add `write`, a static method (path, rows) "
                "that writes a file of the format"
            )
        with TemporaryDirectory() as folder:
            path = Path(folder, f"made{self.suffix}")
            with attributed("write(path, rows)", "it is the kit's only source of such files"):
                self.write(path, rows)
            yield path

    @cached_property
    def folder(self) -> Path:
        """Holds the files that are read; removed with the subject."""
        found = mkdtemp()
        finalize_here(self, shutil.rmtree, found, ignore_errors=True)
        return Path(found)

    def opening(self, content: bytes | Path) -> Opened:
        """Returns a file with this content, or this file, for the reader."""
        if isinstance(content, bytes):
            path = self.folder / f"{len(os.listdir(self.folder))}{self.suffix}"
            path.write_bytes(content)
            return Opened(path)
        return Opened(content)

    @property
    def suffix(self) -> str:
        """The first suffix of the format."""
        return self.spec.suffixes[0]

    def read(self, name: str, content: bytes | Path) -> tuple[Read, BaseException | None]:
        """Reads a file in this process: what came, and the exception that ended it."""
        return self.opened(name, self.opening(content))

    def opened(self, name: str, file: Opened) -> tuple[Read, BaseException | None]:
        """Reads a file whose openings are counted."""
        found: Read = []

        def run() -> BaseException | None:
            try:
                for row in self.reader(file.corpus_file):
                    found.append(self.plain(name, row))
            except CheckFailed:
                raise
            except FAULTS as error:
                return error
            return None

        advice = "end with an exception where the file ends, and never wait for more"
        try:
            return found, bounded(run, SECONDS, f"reading {name}", advice)
        finally:
            file.close()

    def plain(self, name: str, row: Any) -> Values | None:
        """Returns a copy of a row, whose dict a reader may use again; None for a damaged one."""
        if isinstance(row, DamagedRow):
            is_told = isinstance(row.message, str) and row.message
            demand(is_told, f"{name}: a DamagedRow has the message {row.message!r}; say what it is")
            return None
        is_row = isinstance(row, Mapping)
        demand(
            is_row,
            f"{name}: the reader yields a {type(row).__name__}; yield a mapping of columns, or a "
            "DamagedRow(message=...)",
        )
        return dict(row)

    def good(self, name: str, content: bytes | Path) -> list[Values]:
        """Reads a good file. Raises CheckFailed when anything is wrong with it."""
        found, error = self.read(name, content)
        demand(
            error is None,
            f"reading {name} raised {'' if error is None else error_text(error)} after "
            f"{len(found)} rows; read every file of `samples` to its end",
        )
        demand(
            None not in found,
            f"{name}: a row of {len(found)} is a DamagedRow; `samples` are good files, and those "
            "with damage belong into `damaged`",
        )
        return [row for row in found if row is not None]

    def batch_rows(
        self, files: Mapping[str, bytes], max_bytes: int = MAX_CELL_BYTES
    ) -> list[Values | BadItem]:
        """Reads files, in the order of their names, as a batch does: in a process of its own."""
        with TemporaryDirectory() as folder:
            for number, content in enumerate(files.values()):
                Path(folder, f"{number:03}{self.suffix}").write_bytes(content)
            kinds = table_of([self.provided])

            def run() -> list[Values | BadItem]:
                rows = open_rows(folder, max_bytes, kinds=kinds)
                assert rows is not None
                return [row if isinstance(row, BadItem) else row.values for row in rows.read(ALL)]

            advice = "end with an exception where a file ends, and never wait for more"
            with attributed("reading in a process of its own", "make the reader importable there"):
                return bounded(run, 3 * SECONDS, "reading in a process of its own", advice)


class Opened:
    """A file as a reader gets it, whose open file objects and read bytes are counted. path: by
    which it is called, if not by its own."""

    def __init__(self, own: Path, path: str = "") -> None:
        self._file = File(path=str(own), name=own.name)
        self._raws: list[_Counted] = []
        self._buffered: list[BinaryIO] = []  # kept: nothing closes by itself what is forgotten
        self.corpus_file = CorpusFile(
            path=path or str(own), max_bytes=MAX_CELL_BYTES, open=self._open
        )

    @property
    def num_read(self) -> int:
        """How many bytes were read."""
        return sum(each.num_read for each in self._raws)

    @property
    def num_open(self) -> int:
        """How many of the file objects are open."""
        return sum(not each.closed for each in self._raws)

    def close(self) -> None:
        """Closes what the reader has left open."""
        for each in self._buffered:
            each.close()

    def _open(self) -> BinaryIO:
        raw = _Counted(open_content(self._file))
        self._raws.append(raw)
        self._buffered.append(io.BufferedReader(raw, BUFFER_BYTES))
        return self._buffered[-1]


class _Counted(io.RawIOBase):
    """A file object that counts what is read of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_read = 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads up to the size of the buffer."""
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self.num_read += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves to a place."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Returns the place."""
        return self._file.tell()

    def close(self) -> None:
        """Closes the file too."""
        self._file.close()
        super().close()
