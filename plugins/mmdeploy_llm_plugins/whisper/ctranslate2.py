"""Reads Whisper models as CTranslate2 stores them, for faster-whisper and WhisperX: a folder with
model.bin, config.json, vocabulary.json or vocabulary.txt, and mostly tokenizer.json.

    model.bin    u32 version 6, text name of the spec, u32 revision, u32 number of variables, each:
                 text name, u8 axes, u32 each, u8 type, u32 bytes, the values; u32 number of
                 aliases, each: text alias, text name.       text: u16 bytes with a NUL, the bytes

The file may come from anybody: every length is compared with the bytes that are left. A weight in 8
bits has a scale for each row by which its values were multiplied, one in 16 bits has one for all.
Layout: the documentation and the converters of CTranslate2.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.hooks import ModelFile
from mmdeploy_llm.system.guarding.folder_files import (
    MAX_TEXT_BYTES,
    check_regular,
    read_array,
    read_object,
    read_text,
    shown,
)

from .stored import StoredWhisper, check_tokens
from .vocabulary import END, as_bytes, write_tokenizer, write_values

if TYPE_CHECKING:
    from .ctranslate2_weights import CTranslate2Weights

VERSION = 6  # since CTranslate2 3.0, which reads Whisper models first
WHISPER = "WhisperSpec"
GELU = 3
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
JSON = "vocabulary.json"
TEXT = "vocabulary.txt"
TOKENIZER = "tokenizer.json"


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


class CTranslate2Whisper(ModelFile):
    """See ModelFile."""

    def read_json(self, file_name: str) -> Mapping[str, Any]:
        """See ModelFile. preprocessor_config.json is the folder's where it has one."""
        if file_name == "config.json":
            return self._stored.config()
        if file_name == "generation_config.json":
            own = read_object(self.path.with_name("config.json"))
            values = self._stored.generation(own.get("suppress_ids"), own.get("suppress_ids_begin"))
            heads = own.get("alignment_heads")
            return values if heads is None else {**values, "alignment_heads": heads}
        if file_name == "preprocessor_config.json":
            found = read_object(self.path.with_name(file_name))
            return {**self._stored.preprocessor(), **found}
        return {}

    def write_tokenizer(self, folder: Path) -> None:
        """See ModelFile: the folder's tokenizer.json, else one that the vocabulary says."""
        self._check_size()
        end = self._names.index(END)
        words, specials = self._names[:end], self._names[end:]
        values = read_object(self.path.with_name(TOKENIZER), MAX_TEXT_BYTES)
        if not values:
            file = self._vocabulary_file
            write_tokenizer(folder, as_bytes(words, file), specials, file)
        elif isinstance(values.get("added_tokens"), list) and isinstance(
            values.get("model"), dict | None
        ):
            write_values(folder, values, specials, end)
        else:
            raise CheckpointError(f"{TOKENIZER} beside {self.path} is none of a tokenizer")

    def open_weights(self) -> CTranslate2Weights:
        """See ModelFile."""
        from .ctranslate2_weights import CTranslate2Weights

        return CTranslate2Weights(self._variables, self._stored)

    @cached_property
    def _variables(self) -> Variables:
        return read_variables(self.path)

    @cached_property
    def _stored(self) -> StoredWhisper:
        found = self._variables
        self._check_size()
        tokens = {name: at for at, name in enumerate(self._names) if name.startswith("<|")}
        check_tokens(tokens, self._vocabulary_file)
        for name, needed in (("decoder/activation", GELU), ("decoder/pre_norm", 1)):
            if found.numbers.get(name, needed) != needed:
                raise ModelNotSupportedError(f"{self.path} says {found.numbers[name]} as {name}")
        d_model, num_mels, _ = found.shape("encoder/conv1/weight", 3)
        kind = found.tensors.get("decoder/layer_norm/gamma")
        if kind is None or kind.kind not in FLOATS:
            raise wrong(self.path, "has no decoder/layer_norm/gamma in floats")
        return StoredWhisper(
            vocab_size=len(self._names),
            num_mels=num_mels,
            d_model=d_model,
            encoder=_sizes(found, "encoder"),
            decoder=_sizes(found, "decoder"),
            num_frames=found.shape("encoder/position_encodings/encodings", 2)[0],
            num_positions=found.shape("decoder/position_encodings/encodings", 2)[0],
            dtype=kind.kind,
            tokens=tokens,
            is_tied=found.aliases.get("decoder/projection/weight") == "decoder/embeddings/weight",
        )

    @cached_property
    def _names(self) -> list[str]:
        """All tokens, by their ids."""
        path = self.path.with_name(self._vocabulary_file)
        if path.suffix == ".json":
            found = read_array(path, MAX_TEXT_BYTES)
        else:
            found = read_text(path, MAX_TEXT_BYTES).removesuffix("\n").split("\n")
        if not all(isinstance(name, str) for name in found) or END not in found:
            raise CheckpointError(f"{path} is no list of tokens with {END}")
        return found

    @property
    def _vocabulary_file(self) -> str:
        for name in (JSON, TEXT):
            if os.path.lexists(self.path.with_name(name)):
                return name
        raise CheckpointError(f"{self.path.parent} has neither {JSON} nor {TEXT}; add one of them")

    def _check_size(self) -> None:
        size = self._variables.shape("decoder/embeddings/weight", 2)[0]
        if len(self._names) != size:
            raise CheckpointError(
                f"{self._vocabulary_file} has {len(self._names)} tokens, but the embedding in "
                f"{self.path} has {size}; both must be of one model"
            )


def _sizes(found: Variables, side: str) -> tuple[int, int, int]:
    """Returns layers, heads, and channels of the MLP."""
    numbers = {
        int(parts[1].removeprefix("layer_"))
        for parts in (name.split("/") for name in found.tensors)
        if parts[0] == side and len(parts) > 2 and parts[1].removeprefix("layer_").isdecimal()
    }
    if numbers != set(range(len(numbers))) or not numbers:
        raise wrong(found.path, f"lacks layers of the {side}")
    mlp = found.shape(f"{side}/layer_0/ffn/linear_0/weight", 2)[0]
    return len(numbers), found.whole(f"{side}/num_heads"), mlp


def read_variables(path: Path) -> Variables:
    """Reads all of a file but its values. Raises CheckpointError for a file that is malformed or
    ends early, ModelNotSupportedError for another model than Whisper."""
    check_regular(path)
    with path.open("rb") as file:
        reader = _Reader(path, file)
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
            raise wrong(reader.path, f"has {num_axes} axes in {shown(name)}")
        shape = tuple(reader.number("I") for _ in range(num_axes))
        type_, num_bytes = reader.number("B"), reader.number("I")
        if type_ not in TYPES:
            raise wrong(reader.path, f"has the type {type_} in {shown(name)}")
        kind, size, form = TYPES[type_]
        if math.prod(shape) * size != num_bytes:
            raise wrong(reader.path, f"says {num_bytes} bytes for {kind} {shape} in {shown(name)}")
        if name in tensors or name in numbers:
            raise wrong(reader.path, f"holds {shown(name)} twice")
        offset = reader.skip(num_bytes)
        tensors[name] = Variable(name=name, kind=kind, shape=shape or (1,), offset=offset)
        if not shape and form:
            numbers[name] = reader.value_at(offset, form)
    return tensors, numbers


class _Reader:
    """Reads numbers and texts one after the other, none of them beyond the end of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file, self._size = file, os.fstat(file.fileno()).st_size

    def number(self, form: str) -> int:
        """Returns an unsigned number: "B", "H" or "I"."""
        found: int = struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0]
        return found

    def count(self, most: int, least_bytes: int) -> int:
        """Returns a number of parts, of which each takes some bytes at least."""
        found = self.number("I")
        if found > min(most, (self._size - self._file.tell()) // least_bytes):
            raise wrong(self.path, f"says that {found} parts follow")
        return found

    def text(self) -> str:
        """Returns a text of bounded length."""
        size = self.number("H")
        if not 1 <= size <= MAX_NAME:
            raise wrong(self.path, f"has a name of {size} bytes")
        return self._bytes(size).rstrip(b"\0").decode(errors="replace")

    def skip(self, num_bytes: int) -> int:
        """Passes over some bytes. Returns where they begin."""
        begin = self._file.tell()
        if begin + num_bytes > self._size:
            raise wrong(self.path, "ends within its weights: it is truncated")
        self._file.seek(num_bytes, os.SEEK_CUR)
        return begin

    def value_at(self, offset: int, form: str) -> float:
        """Returns the number that was just passed over."""
        self._file.seek(offset)
        found: float = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return found

    def _bytes(self, size: int) -> bytes:
        found = self._file.read(size)
        if len(found) < size:
            raise wrong(self.path, "ends early: it is truncated")
        return found


def wrong(path: Path, what: str) -> CheckpointError:
    """Returns the error for a file that is not as it must be."""
    return CheckpointError(f"{path} is no valid CTranslate2 model: it {what}. Download it again")
