"""Reads config and tokenizer of a model from the metadata of its GGUF file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.system.guarding.folder_files import fault, library_error, shown
from mmdeploy_llm.weights.gguf import find_gguf
from mmdeploy_llm.weights.gguf.config import gguf_config
from mmdeploy_llm.weights.gguf.header import Header, read_headers
from mmdeploy_llm.weights.gguf.lookup import find_tables
from mmdeploy_llm.weights.gguf.tower import media_config

from .schema import MAX_VOCABULARY, check_config

TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
KINDS = ("gpt2", "llama")  # byte-level BPE and SentencePiece: those that transformers converts
PREFIX = "tokenizer.ggml."
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
HINT = "or give tokenizer='a folder with tokenizer.json'"
# Characters: the merges of a vocabulary without any are found by cutting tokens everywhere.
MAX_TOKEN = 1024
MAX_TEXT = 2**24  # all together; the largest published vocabularies have 2**21


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    return any((folder / name).exists() for name in TOKENIZER_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A model that its GGUF files describe. config: transformers'. tables: see
    Checkpoint.gguf_tables. image, video: options of the processors, {} for a text model."""

    config: Any
    tables: tuple[str, ...]
    image: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)


def described(paths: Sequence[Path], tower: Path | None, plugins: PluginManager) -> Described:
    """Describes a model by the metadata of its GGUF files. tower: the file with its vision tower.

    Raises ModelNotSupportedError for an architecture that no plugin knows, CheckpointError for
    metadata that are missing or out of range, and for a missing vision tower.
    """
    text, media = read_headers(paths), None if tower is None else read_headers([tower])
    names, tables = find_tables(plugins, text, media)
    if media is not None:
        found = media_config(text, media, tables)
        return Described(
            config=_config(found.values, paths[0]),
            tables=names,
            image=found.image,
            video=found.video,
        )
    model = tables.model(text)
    if model.needs_tower:
        raise CheckpointError(
            f"{paths[0]} is the text model of an image-text model; put the file with its vision "
            "tower, mmproj-*.gguf, into the same folder"
        )
    return Described(config=_config(gguf_config(text, model), paths[0]), tables=names)


def table_names(
    paths: Sequence[Path], tower: Path | None, plugins: PluginManager
) -> tuple[str, ...]:
    """Returns Checkpoint.gguf_tables of GGUF files beside a config.json. Raises
    ModelNotSupportedError and CheckpointError for files that no plugin can read."""
    text, media = read_headers(paths), None if tower is None else read_headers([tower])
    names, tables = find_tables(plugins, text, media)
    tables.model(text)
    if media is not None:
        tables.tower(media)
    return names


def _config(values: Mapping[str, Any], path: Path) -> Any:
    from transformers import AutoConfig

    check_config(values, path.name)
    try:
        return AutoConfig.for_model(**values)
    except Exception as error:  # transformers raises whatever its config classes raise
        raise CheckpointError(
            f"the metadata of {path} cannot be used: {library_error(error)}"
        ) from error


@contextmanager
def tokenizer_file(path: Path) -> Iterator[Path]:
    """Yields a folder that holds nothing but a GGUF file, for transformers, which would also open
    whatever lies beside it. Raises CheckpointError for a tokenizer that is none."""
    check_tokenizer(read_headers(find_gguf(path)))
    with tempfile.TemporaryDirectory(prefix="mmdeploy-llm-") as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        yield Path(folder)


def without_additions(tokenizer: Any) -> Any:
    """Returns a tokenizer made of a GGUF file without the tokens that are not in the file.

    transformers adds defaults of its classes, such as <|endoftext|>, after the last token: a prompt
    with that text would have an id for which the model has no embedding.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    def is_known(token: str | None) -> bool:
        return token is not None and token in vocabulary

    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    if len(tokenizer) == len(vocabulary):
        return tokenizer
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec["added_tokens"] = [each for each in spec["added_tokens"] if is_known(each["content"])]
    named = tokenizer.special_tokens_map
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **{name: named[name] for name in NAMED if is_known(named.get(name))},
    )


def check_tokenizer(header: Header) -> None:
    """Checks the metadata of which transformers makes a tokenizer. Raises CheckpointError."""
    name = header.paths[0].name
    kind = header.values.get(f"{PREFIX}model")
    if kind not in KINDS:
        raise fault(name, f"{PREFIX}model", f"is {shown(kind)}", f"{' and '.join(KINDS)}; {HINT}")
    tokens = header.values.get(f"{PREFIX}tokens")
    if not isinstance(tokens, tuple) or not 1 <= len(tokens) <= MAX_VOCABULARY:
        raise fault(name, f"{PREFIX}tokens", "is no list", f"1 to {MAX_VOCABULARY} tokens; {HINT}")
    _check_texts(header, "tokens", MAX_TOKEN)
    _check_texts(header, "merges", 2 * MAX_TOKEN + 1)
    for key in TOKEN_KEYS:
        found = header.values.get(PREFIX + key)
        if found is not None and (type(found) is not int or not 0 <= found < len(tokens)):
            raise fault(name, PREFIX + key, f"is {shown(found)}", f"0 to {len(tokens) - 1}")


def _check_texts(header: Header, key: str, limit: int) -> None:
    """Raises CheckpointError for a list of anything but texts of bounded sizes."""
    name, texts = header.paths[0].name, header.values.get(PREFIX + key, ())
    texts = texts if isinstance(texts, tuple) else (texts,)
    for text in texts:
        if not isinstance(text, str) or len(text) > limit:
            raise fault(name, PREFIX + key, f"holds {shown(text)}", f"up to {limit} characters")
    total = sum(map(len, map(str, texts)))
    if total > MAX_TEXT:
        raise fault(name, PREFIX + key, f"holds {total} characters", f"{MAX_TEXT} characters")
