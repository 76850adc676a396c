"""Skipped: what the finding of files has passed over, counted for the summary and listed in a file.

A line of the file: {"skipped": path, "kind": label, "reason": why, "exact": the path with Python's
escapes, when it is not Unicode}. The path of a folder, of which nothing was read, ends in "/".
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmdeploy_llm.data.records.files import Folder, open_regular
from mmdeploy_llm.data.records.unicode_text import escaped, without_surrogates
from mmdeploy_llm.errors import ConfigError

MAX_KINDS = 10  # that a sentence names
# Labels whose noun is counted; others are suffixes and names of files.
_WHOLE = re.compile(
    r"((hidden|special) file|(hidden|linked|unreadable) folder|broken link|subfolder)$"
)
_NOUNS = re.compile(
    r"(file|folder|pointer|raw photo)(?= of )|[^.].*?(?= named \.| without a suffix)"
)
_MARK = b'{"skipped": '


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A file or folder that is not read. label: its kind, which is counted, such as ".svg". hint:
    what makes it readable. is_usual: whether nobody expects it to be read, such as what systems
    write, or what an option leaves out.
    """

    path: str
    label: str
    reason: str
    hint: str = ""
    is_usual: bool = False

    def to_json(self) -> str:
        """Returns one line of JSON."""
        reason = f"{self.reason}; {self.hint}" if self.hint else self.reason
        path = without_surrogates(self.path)
        values = {"skipped": path, "kind": without_surrogates(self.label)}
        values["reason"] = without_surrogates(reason)
        if path != self.path:
            values["exact"] = escaped(self.path)
        return json.dumps(values, ensure_ascii=False)


class Skipped:
    """The files and folders that were passed over, in order. Written by the finding only."""

    def __init__(self) -> None:
        self._all: dict[str, Skip] = {}  # by real place
        self._folders: dict[str, str] = {}  # real places of those that were met
        self._read: set[str] = set()  # real places of folders that the caller has named
        self.notes: list[str] = []  # sentences about the input for the summary

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Skip]:
        return iter(self._all.values())

    def add(self, skip: Skip) -> None:
        """Adds a file or folder, once."""
        place = self._place(skip.path)
        if place not in self._read:
            self._all.setdefault(place, skip)

    def read_too(self, folder: str) -> None:
        """Notes that a folder is read, since the caller has named it, whatever another folder that
        holds it says."""
        for place in (self._place(folder), os.path.realpath(folder)):
            self._read.add(place)
            self._all.pop(place, None)

    def not_read(self, folder: str) -> None:
        """Notes that a folder cannot be read after all, so that it counts, also where it is one
        that the caller has named."""
        self._read -= {self._place(folder), os.path.realpath(folder)}

    def forget(self, real_paths: Iterable[str]) -> None:
        """Takes back files that are read after all, since the caller has named them."""
        if self._all:
            for path in real_paths:
                self._all.pop(path, None)

    def _place(self, path: str) -> str:
        """Returns where a file or folder is: links of its folder resolved, not its own."""
        folder, name = os.path.split(os.path.normpath(path))
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder or ".")
        return os.path.join(self._folders[folder], name)

    @property
    def counts(self) -> Counter[str]:
        """The number of files and folders of each kind."""
        return Counter(skip.label for skip in self)

    @property
    def num_folders(self) -> int:
        """The folders, of which nothing was read."""
        return sum(skip.path.endswith("/") for skip in self)

    @property
    def text(self) -> str:
        """Returns a sentence with the kinds, the most frequent first, the usual ones last; "" when
        there is nothing."""
        if not self._all:
            return ""
        of_kind = {skip.label: skip for skip in self}
        counts = [(num, of_kind[label]) for label, num in self.counts.most_common()]
        # What helps is never among those that are left unnamed, what is usual first of all.
        counts.sort(key=lambda each: (each[1].is_usual, not each[1].hint))
        shown = sorted(counts[:MAX_KINDS], key=lambda each: (each[1].is_usual, -each[0]))
        named = [
            f"{_counted_kind(num, skip.label)}" + (f" ({skip.hint})" if skip.hint else "")
            for num, skip in shown
        ]
        if rest := counts[MAX_KINDS:]:
            words = _counted(len(rest), "other kind")
            named.append(f"{sum(num for num, _ in rest)} of {words} (--skipped FILE lists all)")
        return f"skipped {self._noun()}: {', '.join(named)}"

    def _noun(self) -> str:
        num_folders, num = self.num_folders, len(self)
        words = [_counted(num - num_folders, "file")] if num > num_folders else []
        words += [_counted(num_folders, "folder")] if num_folders else []
        return " and ".join(words)

    def check_target(self, path: Path) -> None:
        """Raises ConfigError when a file of somebody else has the name."""
        try:
            with open_regular(path, os.O_RDONLY) as file:
                head = file.read(len(_MARK)) or b""
        except FileNotFoundError:
            return
        if head and head != _MARK:
            raise ConfigError(
                f"{str(path)!r} exists and is no list of skipped files, so it stays as it is; move "
                "it away or name another file"
            )

    def write(self, path: Path) -> None:
        """Writes the file, an empty one when nothing was skipped. Raises ConfigError as
        `check_target` does."""
        self.check_target(path)
        with Folder.open(path.parent) as folder:
            folder.write(path.name, (f"{skip.to_json()}\n".encode() for skip in self))


def _counted_kind(num: int, label: str) -> str:
    """Counts files by the label of their kind: the noun of one, a suffix or the name of files. In
    "HTML page named .jpg" and "linked folder" the first noun is counted."""
    found = None if label.startswith("by ") else _WHOLE.match(label) or _NOUNS.match(label)
    if num == 1 or found is None:
        return f"{num} {label}"
    return f"{num} {found[0]}s{label[found.end() :]}"


def _counted(num: int, noun: str) -> str:
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"
