"""Opens the content of files that gzip or zstd has packed.

Content is read as a stream, a bounded piece at a time. At its end the checksum is compared, so only
who reads to the end knows that what was read is what was packed.
"""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from typing import Any, BinaryIO, cast

from mmdeploy_llm.errors import ConfigError

from .files import BUFFER_BYTES, File, suffix_of
from .rows import MAX_SHOWN

GZIP = (".gz", ".tgz")
ZSTD = (".zst", ".tzst")
NOT_READ = (".bz2", ".br", ".lz4", ".lzma", ".rar", ".xz", ".z", ".zip", ".7z", *GZIP, *ZSTD)
ZSTD_MODULES = ("compression.zstd", "backports.zstd")  # the first is Python's own from 3.14 on


def also_packed(*suffixes: str) -> tuple[str, ...]:
    """Returns the suffixes, and those of the same files packed."""
    return (*suffixes, *(f"{own}{end}" for end in (".gz", ".zst") for own in suffixes))


def is_packed(name: str) -> bool:
    """Returns whether a file of this name is read through gzip or zstd."""
    return suffix_of(name, (*GZIP, *ZSTD)) is not None


def unpacked_name(name: str) -> str:
    """Returns the name without the suffix of a packer."""
    return name[: -len(suffix)] if (suffix := suffix_of(name, (".gz", ".zst"))) else name


def refuse_packed(name: str, known: tuple[str, ...]) -> None:
    """Raises ConfigError for a name that says that the file is packed in a way that is not read."""
    if suffix := suffix_of(name, NOT_READ):
        ends = " ".join(own for own in known if is_packed(own))
        raise ConfigError(
            f"{name[:MAX_SHOWN]!r} is packed ({suffix}) in a way that is not read; unpack it, or "
            f"give a file that ends in {ends}"
        )


def open_content(file: File) -> BinaryIO:
    """Opens a file, one that is packed as its content. Raises OSError, and ConfigError when a
    library is missing; reading raises OSError for damage too."""
    if suffix_of(file.path, GZIP):
        raw = file.open()
        return _buffered(gzip.GzipFile(fileobj=raw), raw, (EOFError, gzip.BadGzipFile, zlib.error))
    if suffix_of(file.path, ZSTD):
        module = _zstd(file)
        raw = file.open()
        return _buffered(module.ZstdFile(raw), raw, (EOFError, module.ZstdError))
    return file.open()


def _buffered(content: Any, raw: BinaryIO, faults: tuple[type[Exception], ...]) -> BinaryIO:
    unpacked = cast(io.RawIOBase, _Content(content, raw, faults))
    return io.BufferedReader(unpacked, buffer_size=BUFFER_BYTES)


class _Content(io.RawIOBase):
    """The content of a packed file, whose faults are all OSErrors."""

    def __init__(self, content: Any, raw: BinaryIO, faults: tuple[type[Exception], ...]) -> None:
        self._content, self._raw, self._faults = content, raw, faults

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True: what lies between is unpacked."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads up to the size of the buffer; 0 at the end, once the checksum has been compared."""
        view = memoryview(buffer).cast("B")
        try:
            data = self._content.read1(len(view))  # what comes before damage is content
        except self._faults as error:
            raise OSError(f"it is damaged or cut off: {error}") from None
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves to a place in the content."""
        try:
            return int(self._content.seek(offset, whence))
        except self._faults as error:
            raise OSError(f"it is damaged or cut off: {error}") from None

    def tell(self) -> int:
        """Returns the place in the content."""
        return int(self._content.tell())

    def close(self) -> None:
        """Closes the file too."""
        if not self.closed:
            self._content.close()
            self._raw.close()
        super().close()


def _zstd(file: File) -> Any:
    for name in ZSTD_MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError(
        f"{file.path[:MAX_SHOWN]!r} is packed with zstd, and reading it needs backports.zstd: "
        'pip install "mmdeploy-llm[zstd]", or unpack it'
    )
