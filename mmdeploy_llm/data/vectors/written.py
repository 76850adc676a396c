"""Completes an output of `embed`: says which row of which array an item's vector is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from mmdeploy_llm.data.outputs.part_writer import PartsSink
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.shelves import LocalShelf

from .parts import array_reader

IDS = "ids.jsonl"


def finish(sink: Any) -> list[str]:
    """Writes ids.jsonl beside the parts, a line for each record in their order, where the output is
    one of arrays in a folder here. Returns what is told of it."""
    if not (isinstance(sink, PartsSink) and sink.form.has_arrays):
        return []
    if not isinstance(sink.shelf, LocalShelf) or not sink.exists():
        return []
    with Folder.open(Path(sink.name)) as folder:
        folder.write(IDS, _lines(sink))
    return [f"ids:      {Path(sink.name) / IDS}"]


def _lines(sink: PartsSink) -> Iterator[bytes]:
    for name in sink.parts().values():
        with closing(array_reader(sink.form, sink.shelf.open(name), name)) as reader:
            for number, place in enumerate(reader.places()):
                record = reader.at(number)
                values: dict[str, Any] = {"id": record.id, "part": name}
                values["row"] = place.row if place.num_rows else None
                values["rows"] = place.num_rows
                if record.path is not None:
                    values["path"] = record.path
                if record.error is not None:
                    values["error"] = record.error.to_json()
                yield json.dumps(values).encode() + b"\n"
