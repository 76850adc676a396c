"""Reads the header of a GGUF file: metadata, and where each tensor lies.

The file may come from anybody. Every count and length is compared with the bytes that are left, and
with a limit, before anything of that size is read; every tensor must lie within the file and share
no byte with another. The reader of the package `gguf` makes no such checks: a count of 2**60 keeps
it busy for ever. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.system.guarding.folder_files import check_regular, shown

from .library import TensorType, readable_types, type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 * 2**20  # the largest published vocabularies have 15 MiB
MAX_KEYS = 10_000
MAX_ITEMS = 2**22  # of all arrays together
MAX_TEXT = 8 * 2**20  # bytes of a value
MAX_ITEM = 2**16  # bytes of a text in an array
MAX_TENSORS = 100_000
MAX_NAME = 1024  # bytes of a key or of a tensor's name
MAX_AXES = 4
MAX_AXIS = 2**40
MAX_ALIGNMENT = 2**20
DEFAULT_ALIGNMENT = 32

FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9
SCALARS: Mapping[int, str] = {  # number of a type -> format of the module struct
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    FLOAT32: "f",
    BOOL: "B",
    10: "Q",
    11: "q",
    12: "d",
}
Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file. shape: as torch writes it, rows first. offset: of its first byte in file
    number `file`."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: int
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a run of values along the last axis."""
        return self.shape[-1] // self.type.block_size * self.type.block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The metadata of a model's first file, and the tensors of all its files, by name."""

    paths: tuple[Path, ...]
    values: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """general.architecture. Raises CheckpointError when there is none."""
        found = self.values.get("general.architecture")
        if not isinstance(found, str):
            raise CheckpointError(
                f"{self.paths[0]} names no general.architecture; a model for inference has one"
            )
        return found


def read_headers(paths: Sequence[Path]) -> Header:
    """Reads the headers of the files of one model.

    Raises CheckpointError when one is malformed, has a tensor of a type that cannot be read, or
    does not belong to the others.
    """
    types = readable_types()
    values: Mapping[str, Value] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, path in enumerate(paths):
        own, found = _read_header(path, number, types)
        if own.get("split.count", 1) != len(paths) or own.get("split.no", 0) != number:
            raise CheckpointError(
                f"{path} says that it is part {shown(own.get('split.no', 0))} of "
                f"{shown(own.get('split.count', 1))}, but was read as part {number} of "
                f"{len(paths)}; download the files of the model again, under their own names"
            )
        values = values or own
        for tensor in found:
            if tensor.name in tensors:
                raise _wrong(path, f"holds the tensor {shown(tensor.name)} a second time")
            tensors[tensor.name] = tensor
    count = values.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise CheckpointError(
            f"the files of {paths[0]} hold {len(tensors)} tensors, but must hold {shown(count)}; "
            "download them again"
        )
    return Header(paths=tuple(paths), values=values, tensors=tensors)


def _read_header(
    path: Path, number: int, types: Mapping[int, TensorType]
) -> tuple[dict[str, Value], list[StoredTensor]]:
    check_regular(path)
    try:
        with path.open("rb") as file:
            reader = _Reader(path, file)
            values, num_tensors = _read_values(reader)
            infos = [_read_info(reader) for _ in range(num_tensors)]
            start = reader.position
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
        raise _wrong(path, f"has general.alignment {shown(alignment)}")
    if alignment & (alignment - 1):
        raise _wrong(path, f"has general.alignment {alignment}, which is no power of two")
    start += -start % alignment
    tensors = [_tensor(path, number, info, start, types) for info in infos]
    _check_places(path, tensors, reader.size)
    return values, tensors


class _Reader:
    """Reads values from the start of a file on, within its size and MAX_HEADER_BYTES. The only
    writer of its position."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self.size = path.stat().st_size
        self.position = 0
        self._items_left = MAX_ITEMS

    def take(self, num_bytes: int, what: str) -> bytes:
        """Returns the next bytes. Raises CheckpointError when there are not that many."""
        end = self.position + num_bytes
        if end > MAX_HEADER_BYTES:
            raise _wrong(self.path, f"needs more than {MAX_HEADER_BYTES} bytes for {what}")
        data = self._file.read(num_bytes) if end <= self.size else b""
        if len(data) != num_bytes:
            raise _wrong(self.path, f"ends within {what}: it is truncated")
        self.position = end
        return data

    def number(self, kind: str, what: str) -> Any:
        """Returns one number of a format of the module struct."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}"), what))[0]

    def count(self, limit: int, item_bytes: int, what: str) -> int:
        """Returns a count of 64 bits of items that have `item_bytes` bytes or more each."""
        found: int = self.number("Q", what)
        if found > limit or found * item_bytes > self.size - self.position:
            allowed = min(limit, (self.size - self.position) // item_bytes)
            raise _wrong(self.path, f"has {found} {what}; allowed: {allowed}")
        return found

    def text(self, limit: int, what: str) -> str:
        """Returns a text with its length before it."""
        data = self.take(self.count(limit, 1, f"bytes in {what}"), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise _wrong(self.path, f"has text that is not UTF-8 in {what}") from None

    def value(self, kind: int, key: str) -> Value:
        """Returns a metadata value; arrays within arrays are refused."""
        if kind != ARRAY:
            return self._scalar(kind, key)
        inner: int = self.number("I", key)
        if inner not in SCALARS and inner != STRING:
            raise _wrong(self.path, f"has an array of values of type {inner} in {shown(key)}")
        item_bytes = 8 if inner == STRING else struct.calcsize(f"<{SCALARS[inner]}")
        count = self.count(self._items_left, item_bytes, f"items in {shown(key)}")
        self._items_left -= count
        if inner == STRING:
            return tuple(self.text(MAX_ITEM, shown(key)) for _ in range(count))
        data = self.take(count * item_bytes, shown(key))
        return struct.unpack(f"<{count}{SCALARS[inner]}", data)

    def _scalar(self, kind: int, key: str) -> Scalar:
        if kind == STRING:
            return self.text(MAX_TEXT, shown(key))
        if kind not in SCALARS:
            raise _wrong(self.path, f"has a value of type {kind} in {shown(key)}")
        found: int | float = self.number(SCALARS[kind], shown(key))
        if not math.isfinite(found):
            raise _wrong(self.path, f"has {found} in {shown(key)}; allowed: finite numbers")
        if kind == FLOAT32:  # the converter rounded 1e-6, not 9.99999997e-7
            return float(str(np.float32(found)))
        return bool(found) if kind == BOOL else found


def _read_values(reader: _Reader) -> tuple[dict[str, Value], int]:
    """Returns the metadata and the number of tensors."""
    if reader.take(4, "its first bytes") != MAGIC:
        raise _wrong(reader.path, "does not begin with GGUF: it may be a Git LFS pointer")
    version: int = reader.number("I", "its version")
    if version not in VERSIONS:
        note = " (big-endian)" if version & 0xFFFF == 0 and version else ""
        raise _wrong(reader.path, f"has version {version}{note}; allowed: 2 and 3, little-endian")
    num_tensors = reader.count(MAX_TENSORS, 32, "tensors")
    num_keys = reader.count(MAX_KEYS, 13, "metadata keys")
    values: dict[str, Value] = {}
    for _ in range(num_keys):
        key = reader.text(MAX_NAME, "a metadata key")
        if key in values:
            raise _wrong(reader.path, f"has the metadata key {shown(key)} a second time")
        values[key] = reader.value(reader.number("I", shown(key)), key)
    return values, num_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def _read_info(reader: _Reader) -> _Info:
    name = reader.text(MAX_NAME, "the name of a tensor")
    num_axes: int = reader.number("I", shown(name))
    if not 1 <= num_axes <= MAX_AXES:
        raise _wrong(reader.path, f"has {num_axes} axes in {shown(name)}; allowed: 1 to {MAX_AXES}")
    axes = [reader.number("Q", shown(name)) for _ in range(num_axes)]
    if not all(1 <= size <= MAX_AXIS for size in axes):
        raise _wrong(reader.path, f"has the shape {axes} in {shown(name)}")
    return _Info(
        name=name,
        shape=tuple(reversed(axes)),
        type=reader.number("I", shown(name)),
        offset=reader.number("Q", shown(name)),
    )


def _tensor(
    path: Path, number: int, info: _Info, start: int, types: Mapping[int, TensorType]
) -> StoredTensor:
    kind = types.get(info.type)
    if kind is None:
        names = ", ".join(each.name for each in types.values())
        raise CheckpointError(
            f"tensor {shown(info.name)} of {path} has type {type_name(info.type)}, which cannot be "
            f"read; supported: {names}"
        )
    if info.shape[-1] % kind.block_size:
        raise _wrong(
            path,
            f"has rows of {info.shape[-1]} values in {shown(info.name)}, of type {kind.name}, "
            f"which has blocks of {kind.block_size}",
        )
    return StoredTensor(
        name=info.name, type=kind, shape=info.shape, file=number, offset=start + info.offset
    )


def _check_places(path: Path, tensors: Sequence[StoredTensor], size: int) -> None:
    """Raises CheckpointError unless every tensor lies within the file, apart from the others."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda each: each.offset):
        if tensor.offset < end:
            raise _wrong(path, f"has {shown(tensor.name)} within {shown(before)}")
        end, before = tensor.offset + tensor.num_bytes, tensor.name
        if end > size:
            raise _wrong(path, f"ends within the tensor {shown(before)}: it is truncated")


def _wrong(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a valid GGUF file: it {what}. Download it again")
