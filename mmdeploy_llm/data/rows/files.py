"""The files of a corpus: braces, globs and folders expanded, on this machine or by fsspec.

The only file here that imports fsspec. A URL of a corpus is what the user has asked for, so it is
read whatever the rules for remote media are.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable

from .names import expand_glob, is_media_name, is_url, is_visible, natural_key
from .rows import MAX_SHOWN

MAX_FILES = 1_000_000
BUFFER_BYTES = 2**20
_BRACE = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAGIC = re.compile(r"[*?\[{]")


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of a corpus. path: a local path or a URL. name: the path below the folder where the
    corpus begins; a part of ids, so it does not depend on the working folder."""

    path: str
    name: str

    @property
    def folder(self) -> str:
        """The path or URL of the folder that holds it."""
        if self.is_remote:
            return self.path.rpartition("/")[0]
        return str(Path(self.path).parent)

    @property
    def is_remote(self) -> bool:
        """Whether it is not on this machine."""
        return is_url(self.path)

    def open(self) -> BinaryIO:
        """Opens the file for reading, with seek. Raises OSError, or ConfigError for a URL whose
        library is missing."""
        if not self.is_remote:
            return open(self.path, "rb", buffering=BUFFER_BYTES)
        system, path = remote_folder(self.path)
        return cast(BinaryIO, system.open(path, "rb"))


def remote_folder(url: str, use: str = "reading it") -> tuple[Any, str]:
    """Returns the file system of a URL, and the path in it. Raises ConfigError for a scheme that is
    not known or whose library is missing. use: what needs the library, for the message."""
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            f"{url[:MAX_SHOWN]!r} is a URL, and {use} needs fsspec: "
            'pip install "mmdeploy-llm[fsspec]" and the library of its store (s3fs, gcsfs, ...)'
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{url[:MAX_SHOWN]!r} cannot be opened: {str(error)[:MAX_SHOWN]}; give a path, or a "
            "URL that fsspec knows, such as s3://bucket/folder"
        ) from None
    return system, path


def find_files(given: str, suffixes: tuple[str, ...]) -> tuple[File, ...]:
    """Returns the files that a path, a glob, a pattern with braces or a folder (subfolders
    included) names, in natural order. In a folder those with one of the suffixes count.

    Raises ConfigError when there is none, and for local files that a pattern names and that do not
    exist.
    """
    patterns = [given] if not is_url(given) and os.path.lexists(given) else _expanded(given)
    base = base_of(given)
    found: dict[str, None] = {}
    try:
        for pattern in patterns:
            found.update(dict.fromkeys(_matches(pattern, suffixes)))
    except OSError as error:
        raise ConfigError(f"{given!r} cannot be listed: {str(error)[:MAX_SHOWN]}") from None
    if not found:
        raise ConfigError(f"{given!r} has no files that end in {' '.join(suffixes)}")
    missing = [path for path in found if not is_url(path) and not os.path.isfile(path)]
    if missing:
        fault = "is not a regular file" if os.path.lexists(missing[0]) else "does not exist"
        raise ConfigError(
            f"{missing[0]!r} {fault} ({len(missing)} of {len(found)} files); give files that are "
            "there, a glob or a folder"
        )
    return tuple(File(path=path, name=_plain(path).removeprefix(_plain(base))) for path in found)


def refuse_links_out(paths: Iterable[str], base: str, root: str | os.PathLike[str] | None) -> None:
    """Raises ConfigError for a file of a corpus that lies, with links resolved, neither beneath the
    folder that the caller has named nor beneath `root`; None allows every file."""
    if root is None:
        return
    allowed = [os.path.join(os.path.realpath(folder), "") for folder in (base or ".", root)]
    for path in paths:
        if not is_url(path) and not os.path.realpath(path).startswith(tuple(allowed)):
            raise ConfigError(
                f"{path[:MAX_SHOWN]!r} is a link that leads out of the corpus, and out of "
                "allowed_media_root; name the file itself, if you trust it"
            )


def suffix_of(name: str, suffixes: Iterable[str]) -> str | None:
    """Returns the suffix that the name ends in, whatever its case; None without one."""
    lower = name.lower()
    return next((suffix for suffix in suffixes if lower.endswith(suffix)), None)


def suffixes_in(folder: str, suffixes: tuple[str, ...], kinds: KindTable) -> frozenset[str] | None:
    """Returns which suffixes the files of a folder have; None for a folder of media, which is no
    corpus of files: as soon as it shows media, or when it shows nothing but documents, such as a
    kind that is split into pages, which may also explain a corpus."""
    found, has_documents = set(), False
    for name in listed(folder):
        if is_media_name(name, kinds):
            if kinds.of_name(name) not in kinds.yields:
                return None
            has_documents = True
        found.add(suffix_of(name, suffixes))
    found.discard(None)
    return None if has_documents and not found else frozenset(filter(None, found))


def is_pattern(given: str) -> bool:
    """Returns whether a name has braces or wildcards."""
    return _MAGIC.search(given) is not None


def refuse_commands(given: str) -> None:
    """Raises ConfigError for the commands that the package webdataset would run."""
    if given.lstrip().startswith("pipe:"):
        raise ConfigError(
            f"{given[:MAX_SHOWN]!r} would run a command; give files or a URL that fsspec reads, "
            "such as s3://bucket/{000000..000999}.tar"
        )


def _expanded(pattern: str) -> list[str]:
    """Expands {000..123} and {a,b}, the leftmost braces first. Raises ConfigError for more than
    MAX_FILES names."""
    done, todo = [], [pattern]
    while todo:
        text = todo.pop()
        match = _BRACE.search(text)
        if match is None:
            done.append(text)
            continue
        # Reversed: `todo` is a stack, and names come in the order in which they are written.
        options = list(_options(match[1], pattern))[::-1]
        if len(done) + len(todo) + len(options) > MAX_FILES:
            raise ConfigError(f"{pattern!r} names more than {MAX_FILES} files")
        todo += [text[: match.start()] + option + text[match.end() :] for option in options]
    return done


def _options(inside: str, pattern: str) -> Iterator[str]:
    match = _RANGE.fullmatch(inside)
    if match is None:
        return iter(inside.split(","))
    first, last, width = int(match[1]), int(match[2]), len(match[1])
    if last < first or last - first >= MAX_FILES:
        raise ConfigError(
            f"the range {{{inside}}} in {pattern!r} must rise and have at most {MAX_FILES} names"
        )
    return (f"{number:0{width}}" for number in range(first, last + 1))


def base_of(given: str) -> str:
    """Returns what names of files are relative to: the folder itself, or the last folder before
    the first wildcard."""
    if not is_pattern(given) and not is_url(given) and os.path.isdir(given):
        return os.path.join(given, "")
    fixed = given[: found.start()] if (found := _MAGIC.search(given)) else given
    return fixed[: fixed.rfind("/") + 1]


def _plain(path: str) -> str:
    """Returns a path as it is, a URL without its scheme, which file systems write differently."""
    return path.partition("://")[2].lstrip("/") if is_url(path) else path


def _matches(pattern: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    if is_url(pattern):
        return _remote(pattern, suffixes)
    if os.path.isdir(pattern):
        names = (name for name in listed(pattern) if suffix_of(name, suffixes))
    elif os.path.lexists(pattern) or not glob.has_magic(pattern):
        return iter((pattern,))
    else:
        names = (path for path in expand_glob(pattern) if os.path.isfile(path))
    return iter(sorted(names, key=natural_key))


def listed(folder: str) -> Iterator[str]:
    """Yields the visible files of a folder and its subfolders, without following links."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(filter(is_visible, folders), key=natural_key)
        yield from (os.path.join(parent, name) for name in filter(is_visible, names))


def _remote(url: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yields the URLs that a URL names. A file that is named is not looked for: when it is missing,
    that becomes an error of its own rows."""
    system, path = remote_folder(url)
    if glob.has_magic(path):
        names = system.glob(path)
    elif suffix_of(path, suffixes):
        yield url
        return
    else:
        names = [name for name in system.find(path) if suffix_of(name, suffixes)]
    for name in sorted(names, key=natural_key):
        yield system.unstrip_protocol(name)
