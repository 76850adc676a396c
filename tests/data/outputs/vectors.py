"""Records with vectors, and outputs of them."""

from pathlib import Path

import numpy as np

from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.item import Vector
from mmdeploy_llm.data.records.record import ItemError, Record


def made(number: int, shape: tuple[int, ...] = (4,)) -> Record:
    rows = np.random.default_rng(number).standard_normal(shape).astype("f4")
    return Record(id=f"item {number}", line=number, outcome="ok", embedding=Vector.of(rows))


def failed(number: int) -> Record:
    error = ItemError(code=400, kind="RequestError", message="broken")
    return Record(id=f"item {number}", line=number, error=error)


def written(
    path: Path, records: list[Record], mode: str = "new", **options: object
) -> list[Record]:
    sink = open_sink(path, **options)  # type: ignore[arg-type]
    kept = sink.scan(lambda record: record.line) if mode == "resume" else Kept()
    with sink.writer(mode, kept) as writer:  # type: ignore[arg-type]
        for record in records:
            writer.write(record, record.line)
        writer.finish(lambda record: record.line)
    return [entry.record for entry in open_sink(path, **options).entries()]  # type: ignore[arg-type]
