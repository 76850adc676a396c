"""Keeps what a batch writes apart from what it reads, by whatever names somebody gives them."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mmdeploy_llm.data.outputs.base import Sink
from mmdeploy_llm.data.rows.files import is_pattern, suffix_of, suffixes_in
from mmdeploy_llm.data.rows.formats.formats import all_suffixes
from mmdeploy_llm.data.rows.names import is_url
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.system.portable.files import is_same_file

_BRACES = re.compile(r"\{[^{}]*\}")


def check_no_overlap(
    given: str, sink: Sink, kinds: KindTable, log: str | os.PathLike[str] | None = None
) -> None:
    """Raises ConfigError when the output, or the log of events, is the input, lies in it so that a
    resumed run would read it, or has the input among its files. given: a path, a pattern or a
    URL."""
    for own in (*sink.places, *([] if log is None else [Path(log)])):
        if is_url(given) or is_url(str(own)):
            _check_urls(given, str(own))
        elif os.path.lexists(given):
            _check_paths(given, Path(own), kinds)
        elif is_pattern(given) and _matches(given, str(own)):
            raise ConfigError(
                f"{str(own)!r} fits the pattern of the input, {given!r}: a run that is resumed "
                "would read its own results; write the output elsewhere"
            )


def check_lists(lists: Mapping[str, str | os.PathLike[str] | None], sink: Sink) -> None:
    """Raises ConfigError when a list that is written besides, by its option, is a file of the
    output."""
    for option, given in lists.items():
        if given is None:
            continue
        name = os.fspath(given)
        for own in sink.places:
            if not is_url(str(own)) and is_same_file(name, own):
                raise ConfigError(
                    f"{name!r} belongs to the output; name another file with {option}"
                )


def _check_urls(given: str, own: str) -> None:
    first, second = given.rstrip("/"), own.rstrip("/")
    if first == second or first.startswith(f"{second}/"):
        raise ConfigError(f"{own!r} is the input or has it; write the output elsewhere")


def _check_paths(given: str, own: Path, kinds: KindTable) -> None:
    if is_same_file(given, own):
        raise ConfigError(f"{str(own)!r} is the input; write the output elsewhere")
    if any(is_same_file(folder, own) for folder in _folders(given)):
        raise ConfigError(
            f"{str(own)!r} is the folder of the input {given!r}, and its files would be replaced; "
            "write the output elsewhere"
        )
    suffixes = all_suffixes(kinds)
    is_corpus = os.path.isdir(given) and suffixes_in(given, suffixes, kinds) is not None
    is_read = is_corpus and suffix_of(str(own), suffixes) is not None
    if is_read and any(is_same_file(folder, given) for folder in _folders(own)):
        raise ConfigError(
            f"{str(own)!r} lies in the input {given!r}: a run that is resumed would read its own "
            "results; write the output elsewhere"
        )


def _folders(path: str | Path) -> Iterator[Path]:
    """Yields the folders that hold a path, links resolved."""
    yield from Path(os.path.realpath(path)).parents


def _matches(pattern: str, own: str) -> bool:
    """Whether a pattern matches a path: `**` any number of folders, `*` a name in one; braces count
    as `*`."""
    wanted, path = os.path.abspath(_BRACES.sub("*", pattern)), os.path.abspath(own)
    if "**" not in wanted and wanted.count("/") != path.count("/"):
        return False
    return fnmatch.fnmatchcase(path, wanted.replace("**/", "*"))
