"""The export to an imagefolder, all of whose rows `datasets` reads, in the split train.

    FOLDER/data/train/metadata.jsonl   FOLDER/data/train/sub/a.png ...

`datasets` takes a file or a folder whose name has the word of a split, such as holiday_test.png,
for that split, and no other file then. A folder "train" ends that for names of files; names of
folders with such a word are joined with those of their files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmdeploy_llm.data.records.columns import Columns
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.media import LeftOutError
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.unicode_text import replaced
from mmdeploy_llm.data.rows.names import is_media_name
from mmdeploy_llm.system.guarding.claims import claimed

from .export import Export
from .pictures import Pictures, answered, free

METADATA = "metadata.jsonl"
FIXED = ("file_name", "text")
# The words of datasets.data_files.SPLIT_KEYWORDS, between its NON_WORDS_CHARS.
_SPLIT = re.compile(
    r"(?:.*[-._ 0-9])?(?:train|training|validation|valid|dev|val|test|testing|eval|evaluation)"
    r"(?:[-._ 0-9].*)?",
    re.DOTALL,
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d(?::\d\d(?::\d\d)?)?(?:Z|[-+]\d\d:?\d\d)?)?")


def write_imagefolder(export: Export) -> None:
    """Writes a folder that `datasets` reads as an imagefolder, or only the metadata.jsonl of a
    folder that has the pictures already."""
    out = Path(export.output)
    if out.name == METADATA:
        with _new_metadata(export, out.parent), Folder.open(out.parent) as opened:
            names = _write(export, opened, is_copied=False)
            _note_others(export, out.parent, names)
        return
    with (
        free(export, out),
        Folder.open(out) as outer,
        outer.inner("data") as inner,
        inner.inner("train") as opened,
    ):
        _write(export, opened, is_copied=True)
        export.notes.append(
            "pictures and captions are in data/train, so that datasets reads all of them, as the "
            "split train"
        )


@contextmanager
def _new_metadata(export: Export, folder: Path) -> Iterator[None]:
    """Claims metadata.jsonl in a folder of pictures, as `free` does."""
    export.check_new(folder / METADATA)
    with claimed(folder, is_folder=True):
        export.check_new(folder / METADATA)
        yield


def _write(export: Export, folder: Folder, *, is_copied: bool) -> set[str]:
    """Writes the metadata, and the pictures before it; returns the names of these."""
    columns = Columns(fixed=FIXED, fields=())
    for item in export.items():
        columns.add(_values(item.record))
    rows = _Rows(columns=columns)
    pictures = Pictures(folder, export.options.kinds, is_copied=is_copied)
    folder.write(METADATA, rows.lines(export, pictures, is_copied=is_copied))
    export.notes += rows.notes()
    kinds = map(export.options.kinds.of_name, rows.names)
    others = sum(kind not in ("image", None) for kind in kinds)
    if others:
        export.notes.append(
            f"{others} of the files are no images: the imagefolder of datasets does not decode "
            "them, its videofolder and audiofolder read folders of such files alone"
        )
    return rows.names


@dataclass(slots=True, kw_only=True)
class _Rows:
    """The lines of the metadata. joined: a picture whose folders are part of its name now, and how
    many these are. texts: the columns with a text that is no date; dates: those with a date."""

    columns: Columns
    names: set[str] = field(default_factory=set)
    joined: dict[str, str] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)
    dates: set[str] = field(default_factory=set)

    def lines(self, export: Export, pictures: Pictures, *, is_copied: bool) -> Iterator[bytes]:
        """Yields a line for each picture that can be used."""
        for item in answered(export):
            wanted = _without_split(item.relative)
            try:
                name = pictures.take(item, wanted)
                _check_name(name)
            except LeftOutError as error:
                export.leave_out(f"its picture cannot be used: {error}")
                continue
            if is_copied and wanted != item.relative:
                self.joined[item.relative] = name
            self.names.add(name)
            cells = self.columns.cells(_values(item.record))
            yield self._line({"file_name": name, "text": item.record.text, **cells})

    def _line(self, values: dict[str, Any]) -> bytes:
        for name, value in values.items():
            if value is not None:
                is_date = isinstance(value, str) and _DATE.fullmatch(value) is not None
                (self.dates if is_date else self.texts).add(name)
        return json.dumps(replaced(values), ensure_ascii=False).encode() + b"\n"

    def notes(self) -> list[str]:
        """Returns what a reader of the folder should know."""
        found = []
        if self.joined:
            old, new = next(iter(self.joined.items()))
            found.append(
                f"{len(self.joined)} names have the folders in them, which hold the word of a "
                f"split: {old!r} is {new!r}"
            )
        for name in sorted(self.dates - self.texts):
            found.append(
                f"all values of the column {name!r} are dates: datasets reads them as times, and "
                "has the texts from Parquet only"
            )
        return found


def _check_name(name: str) -> None:
    """Raises LeftOutError for a name that `datasets` takes for something else."""
    if "::" in name or "\\" in name:
        raise LeftOutError("datasets reads no name with :: or a backslash")
    if replaced(name) != name:
        raise LeftOutError("its name is no Unicode")


def _without_split(path: str) -> str:
    """Returns a path whose folders have no word of a split: then they are part of the name."""
    *folders, _ = path.split("/")
    return path.replace("/", "_") if any(map(_SPLIT.fullmatch, folders)) else path


def _note_others(export: Export, folder: Path, names: set[str]) -> None:
    """Says what `datasets` makes of the files that are in a folder of pictures."""
    num_others, split = 0, None
    for path in _files(folder):
        num_others += is_media_name(path, export.options.kinds) and path not in names
        split = split or next((part for part in path.split("/") if _SPLIT.fullmatch(part)), None)
    if num_others:
        export.notes.append(
            f"{num_others} pictures beneath {str(folder)!r} are not in {METADATA}: datasets leaves "
            "them out"
        )
    if split is not None:
        export.notes.append(
            f"the name {split!r} has the word of a split, so that datasets would not read all: "
            f"load_dataset('imagefolder', data_files={str(folder / METADATA)!r}) does"
        )


def _files(folder: Path) -> Iterator[str]:
    """Yields the paths of the files beneath a folder."""
    for root, _, names in os.walk(folder):
        for name in names:
            yield os.path.relpath(os.path.join(root, name), folder)


def _values(record: Record) -> dict[str, Any]:
    """Returns the answers and the carried columns of a record."""
    values: dict[str, Any] = json.loads(record.to_json())
    return {name: values[name] for name in ("answers", "columns") if name in values}
