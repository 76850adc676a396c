"""Reads Whisper models as whisper.cpp stores them: one file such as ggml-base.bin.

    i32 magic, 11 i32 of sizes, i32 rows and i32 columns of the mel filters, the filters in float32,
    i32 number of tokens, each: i32 bytes, the bytes; then tensors up to the end of the file, each:
    i32 axes, i32 bytes of the name, i32 type of ggml, i32 for each axis, the last one first, the
    name, the values

The file may come from anybody: every length is compared with the bytes that are left. The filters
are not read, since transformers computes the same. A file holds no list of tokens that are never
written: it is that of Whisper's authors, as transformers has it. Layout: whisper.cpp's converter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mmdeploy_llm.hooks import ModelFile
from mmdeploy_llm.weights.other_files import BlockFile, StoredTensor, check_regular, shown

from .ggml_weights import open_weights, type_of, wrong
from .stored import MULTILINGUAL, StoredWhisper, check_tokens
from .stored_bytes import StoredBytes
from .vocabulary import END, write_tokenizer

SIZES = (
    "vocab_size",
    "num_frames",
    "encoder_size",
    "encoder_heads",
    "encoder_layers",
    "num_positions",
    "decoder_size",
    "decoder_heads",
    "decoder_layers",
    "num_mels",
    "type",
)
FLOAT32 = 0
NUM_TIMES = 1501
MOST_LANGUAGES = 100
MAX_SIZE = 2**20
MAX_TOKENS = 2**20
MAX_TENSORS = 10_000
MAX_NAME = 1024
MAX_AXES = 4
MLP_OF_CHANNELS = 4
SPACE = b" "


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All of a file but its values. words: the tokens that are no special ones."""

    sizes: Mapping[str, int]
    words: Sequence[bytes]
    tensors: Sequence[StoredTensor]


class GGMLWhisper(ModelFile):
    """See ModelFile."""

    def read_json(self, file_name: str) -> Mapping[str, Any]:
        """See ModelFile."""
        if file_name == "config.json":
            return self._stored.config()
        if file_name == "preprocessor_config.json":
            return self._stored.preprocessor()
        if file_name == "generation_config.json":
            return self._stored.generation(self._suppressed(), self._first())
        return {}

    def write_tokenizer(self, folder: Path) -> None:
        """See ModelFile."""
        contents = self._contents
        write_tokenizer(folder, contents.words, list(self._stored.tokens), self.path.name)

    def open_weights(self) -> BlockFile:
        """See ModelFile."""
        return open_weights(self.path, self._contents.tensors)

    @cached_property
    def _contents(self) -> Contents:
        return read_contents(self.path)

    @cached_property
    def _stored(self) -> StoredWhisper:
        sizes, words = self._contents.sizes, self._contents.words
        if sizes["encoder_size"] != sizes["decoder_size"]:
            raise wrong(self.path, "has encoder and decoder of different sizes")
        tokens = special_tokens(sizes["vocab_size"], len(words), self.path)
        check_tokens(tokens, self.path.name)
        d_model = sizes["decoder_size"]
        parts = {
            side: (sizes[f"{side}_layers"], sizes[f"{side}_heads"], MLP_OF_CHANNELS * d_model)
            for side in ("encoder", "decoder")
        }
        return StoredWhisper(
            vocab_size=sizes["vocab_size"],
            num_mels=sizes["num_mels"],
            d_model=d_model,
            num_frames=sizes["num_frames"],
            num_positions=sizes["num_positions"],
            dtype="float32" if sizes["type"] == FLOAT32 else "float16",
            tokens=tokens,
            encoder=parts["encoder"],
            decoder=parts["decoder"],
        )

    def _suppressed(self) -> list[int]:
        """Returns the tokens that are never written: signs that nobody speaks, and marks."""
        from transformers.models.whisper import configuration_whisper as whisper

        tokens, size = self._stored.tokens, self._stored.vocab_size
        is_many = size >= MULTILINGUAL
        signs = whisper.NON_SPEECH_TOKENS_MULTI if is_many else whisper.NON_SPEECH_TOKENS
        marks = [number for name, number in tokens.items() if name in MARKS]
        return sorted({*(sign for sign in signs if sign < tokens[END]), *marks})

    def _first(self) -> list[int]:
        """Returns the tokens with which no answer begins: a space, and the end."""
        spaces = [self._contents.words.index(SPACE)] if SPACE in self._contents.words else []
        return [*spaces, self._stored.tokens[END]]


MARKS = (
    "<|startoftranscript|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
)


def special_tokens(vocab_size: int, num_words: int, path: Path) -> dict[str, int]:
    """Returns the special tokens, whose ids follow those of the words: the end, the start,
    languages, tasks, marks and times. Raises CheckpointError where their number does not fit."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    others = (END, MARKS[0]), (*MARKS[1:], "<|notimestamps|>")
    num_languages = vocab_size - num_words - NUM_TIMES - sum(map(len, others))
    languages = [f"<|{code}|>" for code in LANGUAGES][:num_languages]
    if not 1 <= num_languages == len(languages) <= MOST_LANGUAGES:
        raise wrong(
            path, f"has {vocab_size} tokens of which {num_words} are words, as no Whisper model has"
        )
    times = (f"<|{number * 0.02:.2f}|>" for number in range(NUM_TIMES))
    names = (*others[0], *languages, *others[1], *times)
    return {name: number for number, name in enumerate(names, num_words)}


def read_contents(path: Path) -> Contents:
    """Reads all of a file but its values. Raises CheckpointError for one that is malformed or ends
    early."""
    check_regular(path)
    with path.open("rb") as file:
        reader = _Reader(path, file, wrong)
        reader.skip(4, "values")  # the magic number, by which the file was found
        sizes = {name: reader.number(0 if name == "type" else 1, MAX_SIZE) for name in SIZES}
        mels, bins = reader.number(1, MAX_SIZE), reader.number(1, MAX_SIZE)
        if mels != sizes["num_mels"]:
            raise wrong(path, f"has {mels} mel filters, but says {sizes['num_mels']}")
        reader.skip(4 * mels * bins, "values")
        words = [
            reader.bytes(reader.number(0, MAX_NAME))
            for _ in range(reader.number(1, min(MAX_TOKENS, reader.left // 4)))
        ]
        # The older converter writes the end, too, and all of the others do not.
        ends = [at for at, word in enumerate(words) if word == END.encode()]
        tensors = tuple(_read_tensors(reader))
    return Contents(sizes=sizes, words=words[: ends[0]] if ends else words, tensors=tensors)


def _read_tensors(reader: _Reader) -> Iterator[StoredTensor]:
    names = set[str]()
    while reader.left:
        num_axes = reader.number(1, MAX_AXES)
        length, type_ = reader.number(1, MAX_NAME), reader.number(0, MAX_NAME)
        axes = [reader.number(1, MAX_SIZE) for _ in range(num_axes)]
        name = reader.bytes(length).decode(errors="replace")
        kind = type_of(type_, reader.path, name)
        if axes[0] % kind.block_size or name in names or len(names) >= MAX_TENSORS:
            raise reader.error(f"holds {shown(name)} twice, or of a shape {axes}")
        names.add(name)
        num_bytes = math.prod(axes) // kind.block_size * kind.block_bytes
        begin = reader.skip(num_bytes, "values")
        yield StoredTensor(name=name, type=kind, shape=tuple(reversed(axes)), file=0, offset=begin)


class _Reader(StoredBytes):
    """Reads the numbers and texts of a file one after the other."""

    def number(self, least: int, most: int) -> int:
        """Returns a number within these bounds."""
        found = self.unpacked("<i")
        if not least <= found <= most:
            raise self.error(f"says {found} where {least} to {most} is allowed")
        return found
