"""Exports of boxes, as trainers of detectors read them.

    coco   one JSON file: pictures, boxes, categories
    yolo   FOLDER/classes.txt  FOLDER/labels/sub/a.txt ...     a line for each box

A picture in which no box was found is an example too: it has no annotation, or an empty file. Class
ids are places in the sorted labels: the same labels have the same ids in any order of records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path

from mmdeploy_llm.data.outputs.sidecars.writer import write_beside
from mmdeploy_llm.data.records.boxes import boxes_of
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.unicode_text import without_surrogates
from mmdeploy_llm.media.boxes.writing import Labelled, coco, labels_of, yolo_lines

from .export import Export
from .pictures import answered, free, plain

NO_BOXES = "its boxes were not read: the run was without --boxes, or it has not one picture"
CLASSES = "classes.txt"
MAX_CLASSES_BYTES = 2**24


def write_coco(export: Export) -> None:
    """Writes a dataset in COCO's format."""
    pictures = list(_pictures(export))
    export.write_file([json.dumps(coco(pictures), ensure_ascii=False).encode() + b"\n"])
    _note(export, pictures)


def write_yolo(export: Export) -> None:
    """Writes a folder with a text for each picture, beneath `labels`, and the names of the classes.
    Of two pictures whose names differ in the suffix only the first is written. Classes of an
    earlier export there keep their ids: it may have texts of other pictures."""
    out = Path(export.output)
    with free(export, out):
        pictures = _named_apart(export)
        _write_folder(out, pictures)
    _note(export, pictures)


def _named_apart(export: Export) -> list[Labelled]:
    pictures, taken = [], set[str]()
    for picture in _pictures(export):
        stem = _stem(picture.name)
        if stem.casefold() in taken:
            export.leave_out("another picture has its name, but for the suffix")
            continue
        taken.add(stem.casefold())
        pictures.append(picture)
    return pictures


def _write_folder(out: Path, pictures: list[Labelled]) -> None:
    with Folder.open(out) as folder, folder.inner("labels") as inner:
        known = _classes(folder)
        labels = [*known, *(label for label in labels_of(pictures) if label not in known)]
        classes = {label: number for number, label in reversed(list(enumerate(labels)))}
        for picture in pictures:
            text = "".join(f"{line}\n" for line in yolo_lines(picture, classes))
            _write(inner, f"{_stem(picture.name)}.txt", text)
        _write(folder, CLASSES, "".join(f"{label}\n" for label in labels))


def _pictures(export: Export) -> Iterator[Labelled]:
    """Yields the pictures whose boxes were read; the others are left out."""
    for item in answered(export):
        found = boxes_of(item.record.boxes, item.record.picture_size)
        if found is None:
            export.leave_out(NO_BOXES)
            continue
        labels = (" ".join(without_surrogates(own.label).split()) for own in found.boxes)
        boxes = [own.named(label) for own, label in zip(found.boxes, labels, strict=True)]
        yield Labelled(name=without_surrogates(item.relative), size=found.size, boxes=boxes)


def _note(export: Export, pictures: list[Labelled]) -> None:
    num_boxes = sum(len(picture.boxes) for picture in pictures)
    num_empty = sum(not picture.boxes for picture in pictures)
    num_labels = len(labels_of(pictures))
    export.notes.append(
        f"{num_boxes} boxes of {num_labels} classes in {len(pictures) - num_empty} pictures, "
        f"{num_empty} have none"
    )


def _stem(name: str) -> str:
    """Returns a path without its suffix that leads nowhere but beneath its folder."""
    parts = [plain(part) for part in os.path.splitext(name)[0].split("/")]
    return "/".join(part for part in parts if part.strip(".")) or "picture"


def _classes(folder: Folder) -> list[str]:
    """Returns the classes of an earlier export to a folder."""
    if CLASSES not in folder.names():
        return []
    with BufferedReader(folder.open_file(CLASSES, os.O_RDONLY)) as file:
        text = file.read(MAX_CLASSES_BYTES).decode("utf-8", "replace")
    return text.splitlines()


def _write(folder: Folder, name: str, text: str) -> None:
    with ExitStack() as stack:
        for part in name.split("/")[:-1]:
            folder = stack.enter_context(folder.inner(part))
        write_beside(folder, os.path.basename(name), [text.encode()])
