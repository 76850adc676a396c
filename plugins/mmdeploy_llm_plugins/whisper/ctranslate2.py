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

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import CheckpointError, ModelNotSupportedError
from mmdeploy_llm.hooks import ModelFile
from mmdeploy_llm.weights.other_files import (
    MAX_TEXT_BYTES,
    read_array,
    read_object,
    read_text,
)

from .ctranslate2_header import FLOATS, Variables, read_variables, wrong
from .ctranslate2_weights import CTranslate2Weights
from .stored import StoredWhisper, check_tokens
from .vocabulary import END, as_bytes, write_tokenizer, write_values

GELU = 3
JSON = "vocabulary.json"
TEXT = "vocabulary.txt"
TOKENIZER = "tokenizer.json"


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
