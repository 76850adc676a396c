"""Shows which items are near to each other: what a search has found, and in the report of an output
with vectors the nearest neighbours of some items."""

from __future__ import annotations

import datetime
import random
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from mmdeploy_llm.batch.report.page import ReportHead, write_report
from mmdeploy_llm.batch.report.previews import MakePreviews
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.vectors.opened import Vectors
from mmdeploy_llm.data.vectors.search import Found, search, vectors_at
from mmdeploy_llm.hooks import KindTable

from .pictures import Near

NUM_ITEMS, NUM_NEIGHBOURS = 10, 6


def write_found(
    path: Path,
    found: Sequence[Found],
    query: str,
    model: str,
    make: MakePreviews,
    roots: Collection[str],
) -> None:
    """Writes a page of what a search has found, the best first. query: in words. roots: see
    media_of. Raises as write_report does."""
    index = RecordIndex()
    records = [replace(own.record, text=f"{own.score:.4f}", embedding=None) for own in found]
    for place, record in enumerate(records):
        index.add(record, place, place)
    head = ReportHead(
        model=model,
        prompt=query,
        created=f"{datetime.datetime.now():%d %B %Y, %H:%M}",
        version=metadata.version("mmdeploy-llm"),
        done="found",
    )
    write_report(path, records, head, index, make, num_shown=len(records), roots=roots)


def strips_of(output: str, kinds: KindTable) -> list[list[Near]]:
    """Returns NUM_ITEMS random items of an output, always the same ones, each with its nearest
    neighbours; none of an output with fewer than two vectors. Raises ConfigError."""
    vectors = Vectors([output], kinds=kinds)
    numbers = array("q")
    for block in vectors.blocks():
        numbers.extend(block.numbers.tolist())
    if len(numbers) < 2:
        return []
    drawn = sorted(random.Random(0).sample(numbers, min(NUM_ITEMS, len(numbers))))
    queries = vectors_at(vectors, drawn)
    found = search(vectors, [queries[own] for own in drawn], NUM_NEIGHBOURS, excluded=drawn)
    first = zip(vectors.records(drawn), found, strict=True)
    return [
        [Near(record=record), *(Near(record=own.record, score=own.score) for own in near)]
        for record, near in first
    ]
