"""Encodes rows that a child reads of a table: JSON, and bytes and arrays as buffers of a frame.

Bytes, arrays, dates and the like stand in the JSON as {MARK: [kind, ...]}. The mark is a secret of
both processes, so no row of a table can look like that.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.data.rows.rows import MARKS, MAX_MARKS
from mmdeploy_llm.system.processes.frames import MAX_TEXT, Frame


class TooLargeError(Exception):
    """A row is larger than allowed."""


class Encoder:
    """Turns rows into messages. max_cell: bytes of one buffer, such as an image."""

    def __init__(self, mark: str, max_cell: int) -> None:
        self._mark, self._max_cell = mark, max_cell

    def encode(self, fields: Mapping[str, Any]) -> tuple[bytes, list[Any]]:
        """Returns the JSON of a message, and its buffers. Raises TooLargeError, and RecursionError
        for values that are nested too deeply."""
        buffers: list[Any] = []

        def replaced(value: Any) -> object:
            if isinstance(value, (bytes, bytearray, memoryview)):
                return {self._mark: ["bytes", self._kept(value, buffers)]}
            if hasattr(value, "__array_interface__"):
                number = self._kept(value.tobytes(), buffers)
                return {self._mark: ["array", [number, value.dtype.str, value.shape]]}
            return {self._mark: _as_text(value)}

        text = json.dumps(fields, default=replaced)
        if len(text) > MAX_TEXT:
            raise TooLargeError(f"its texts are longer than {MAX_TEXT} bytes")
        if len(text) > MAX_MARKS and sum(map(text.count, MARKS)) > MAX_MARKS:
            raise TooLargeError(f"it has more than {MAX_MARKS} values")
        return text.encode(), buffers

    def _kept(self, data: Any, buffers: list[Any]) -> int:
        """Returns the number of the buffer that these bytes become."""
        if len(data) > self._max_cell:
            raise TooLargeError(
                f"a cell has {len(data)} bytes, {self._max_cell} are allowed; leave it out, or for "
                "media raise max_media_bytes"
            )
        buffers.append(data)
        return len(buffers) - 1


def decode(frame: Frame, mark: str) -> dict[str, Any]:
    """Returns the fields of a message. Raises ValueError, LookupError, TypeError and RecursionError
    for one that is none."""

    def restored(value: dict[str, Any]) -> Any:
        if mark not in value:
            return value
        kind, found = value[mark]
        if kind == "array":
            import numpy as np

            number, dtype, shape = found
            return np.frombuffer(frame.buffers[number], np.dtype(dtype)).reshape(shape)
        return bytes(frame.buffers[found]) if kind == "bytes" else _of_text(kind, found)

    # A call for each object is what most of the time goes to, so only where there is something.
    hook = restored if mark.encode() in frame.text else None
    fields = json.loads(frame.text, object_hook=hook)
    if not isinstance(fields, dict):
        raise ValueError("a message is not an object")
    return fields


def _as_text(value: object) -> list[str]:
    """Returns the kind and text of a value that JSON does not have."""
    if isinstance(value, datetime.datetime):
        return ["datetime", value.isoformat()]
    if isinstance(value, datetime.date):
        return ["date", value.isoformat()]
    if isinstance(value, datetime.time):
        return ["time", value.isoformat()]
    if isinstance(value, datetime.timedelta):
        return ["timedelta", f"{value.days} {value.seconds} {value.microseconds}"]
    if isinstance(value, decimal.Decimal):
        return ["decimal", str(value)]
    return ["text", str(value)]


def _of_text(kind: str, text: str) -> Any:
    match kind:
        case "datetime":
            return datetime.datetime.fromisoformat(text)
        case "date":
            return datetime.date.fromisoformat(text)
        case "time":
            return datetime.time.fromisoformat(text)
        case "timedelta":
            days, seconds, microseconds = map(int, text.split())
            return datetime.timedelta(days, seconds, microseconds)
        case "decimal":
            return decimal.Decimal(text)
    return text
