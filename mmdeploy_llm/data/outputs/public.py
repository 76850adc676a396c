"""Names that plugins import for formats of outputs that do more than keep lines of JSON: parts and
their readers, records, pictures, arrays, and vectors as columns of Arrow tables."""

from __future__ import annotations

from mmdeploy_llm.data.records.arrow_vectors import (
    EMBEDDING,
    VectorKind,
    arrays_of,
    column_of,
    field_of,
    kind_in,
)
from mmdeploy_llm.data.records.growing import GrowingPart
from mmdeploy_llm.data.records.item import Vector
from mmdeploy_llm.data.records.media import Blob, LeftOutError, OpenMedia
from mmdeploy_llm.data.records.npy_head import NpyHead, read_npy_head
from mmdeploy_llm.data.records.record import Record

from .formats import (
    ArrayPlace,
    ArrayReader,
    CompletePart,
    Drops,
    Limits,
    PartFormat,
    PartReader,
    damaged,
    first_positions,
)
from .lines import LineParts, LineReader
from .scan import Entry

__all__ = [
    "EMBEDDING",
    "ArrayPlace",
    "ArrayReader",
    "Blob",
    "CompletePart",
    "Drops",
    "Entry",
    "GrowingPart",
    "LeftOutError",
    "Limits",
    "LineParts",
    "LineReader",
    "NpyHead",
    "OpenMedia",
    "PartFormat",
    "PartReader",
    "Record",
    "Vector",
    "VectorKind",
    "arrays_of",
    "column_of",
    "damaged",
    "field_of",
    "first_positions",
    "kind_in",
    "read_npy_head",
]
