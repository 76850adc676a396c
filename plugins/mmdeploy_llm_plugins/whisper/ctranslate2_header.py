"""Reads all of a model.bin of CTranslate2 but its values. Its layout stands in ctranslate2.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.weights.other_files import check_regular, shown

from .stored_bytes import StoredBytes

VERSION = 6  # since CTranslate2 3.0, which reads Whisper models first
WHISPER = "WhisperSpec"
# Number of a type -> its name in torch, bytes of a value, format of the module struct.
TYPES: Mapping[int, tuple[str, int, str]] = {
    0: ("float32", 4, "<f"),
    1: ("int8", 1, "<b"),
    2: ("int16", 2, "<h"),
    3: ("int32", 4, "<i"),
    4: ("float16", 2, "<e"),
    5: ("bfloat16", 2, ""),
}
FLOATS = ("float32", "float16", "bfloat16")
MAX_VARIABLES = 100_000
MAX_NAME = 1024
MAX_AXES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A stored tensor. kind: name of its type in torch. offset: of its first byte in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Variables:
    """The contents of model.bin. numbers: the values of variables without axes. aliases: another
    name -> the name of a variable."""

    path: Path
    tensors: Mapping[str, Variable]
    numbers: Mapping[str, float]
    aliases: Mapping[str, str]

    def shape(self, name: str, num_axes: int) -> tuple[int, ...]:
        """Returns the sizes of a variable. Raises CheckpointError where it is not there."""
        found = self.tensors.get(name)
        if found is None or len(found.shape) != num_axes or not all(found.shape):
            held = "has no" if found is None else f"has the shape {list(found.shape)} of"
            raise wrong(self.path, f"{held} {name}, of {num_axes} axes")
        return found.shape

    def whole(self, name: str) -> int:
        """Returns a number. Raises CheckpointError where it is not there, or below 1."""
        found = self.numbers.get(name)
        if found is None or found < 1 or found != int(found):
            raise wrong(self.path, f"says {shown(found)} as {name}")
        return int(found)


def read_variables(path: Path) -> Variables:
    """Reads all of a file but its values. Raises CheckpointError for a file that is malformed or
    ends early, ModelNotSupportedError for another model than Whisper."""
    check_regular(path)
    with path.open("rb") as file:
        reader = _Reader(path, file, wrong)
        version = reader.number("I")
        if version != VERSION:
            raise CheckpointError(
                f"{path} is of version {version} of CTranslate2's format; read is {VERSION}, which "
                "CTranslate2 3.0 and later write. Convert the model again"
            )
        spec = reader.text()
        if spec != WHISPER:
            raise ModelNotSupportedError(
                f"{path} is a CTranslate2 model of the kind {spec[:60]!a}; of these only Whisper "
                f"({WHISPER}) is read. Give the folder in transformers' format that it was "
                "converted from, or install a plugin that reads it"
            )
        reader.number("I")  # the revision, by which only the names of variables differ
        tensors, numbers = _read_tensors(reader)
        aliases = dict(
            (reader.text(), reader.text()) for _ in range(reader.count(MAX_VARIABLES, 6))
        )
    for alias, name in aliases.items():
        if name not in tensors and name not in numbers:
            raise wrong(path, f"names {shown(name)} as {shown(alias)}, which is not there")
    return Variables(path=path, tensors=tensors, numbers=numbers, aliases=aliases)


def _read_tensors(reader: _Reader) -> tuple[dict[str, Variable], dict[str, float]]:
    tensors: dict[str, Variable] = {}
    numbers: dict[str, float] = {}
    for _ in range(reader.count(MAX_VARIABLES, 9)):
        name = reader.text()
        num_axes = reader.number("B")
        if num_axes > MAX_AXES:
            raise reader.error(f"has {num_axes} axes in {shown(name)}")
        shape = tuple(reader.number("I") for _ in range(num_axes))
        type_, num_bytes = reader.number("B"), reader.number("I")
        if type_ not in TYPES:
            raise reader.error(f"has the type {type_} in {shown(name)}")
        kind, size, form = TYPES[type_]
        if math.prod(shape) * size != num_bytes:
            raise reader.error(f"says {num_bytes} bytes for {kind} {shape} in {shown(name)}")
        if name in tensors or name in numbers:
            raise reader.error(f"holds {shown(name)} twice")
        offset = reader.skip(num_bytes, "weights")
        tensors[name] = Variable(name=name, kind=kind, shape=shape or (1,), offset=offset)
        if not shape and form:
            numbers[name] = reader.value_at(offset, form)
    return tensors, numbers


class _Reader(StoredBytes):
    """Reads the numbers and texts of a file one after the other."""

    def number(self, form: str) -> int:
        """Returns an unsigned number: "B", "H" or "I"."""
        return self.unpacked(f"<{form}")

    def count(self, most: int, least_bytes: int) -> int:
        """Returns a number of parts, of which each takes some bytes at least."""
        found = self.number("I")
        if found > min(most, self.left // least_bytes):
            raise self.error(f"says that {found} parts follow")
        return found

    def text(self) -> str:
        """Returns a text of bounded length."""
        size = self.number("H")
        if not 1 <= size <= MAX_NAME:
            raise self.error(f"has a name of {size} bytes")
        return self.bytes(size).rstrip(b"\0").decode(errors="replace")


def wrong(path: Path, what: str) -> CheckpointError:
    """Returns the error for a file that is not as it must be."""
    return CheckpointError(f"{path} is no valid CTranslate2 model: it {what}. Download it again")
