"""Makes the tokenizer of a Whisper model from the list of its tokens, where its file has no other.

Whisper's tokens are numbered in the order in which they were merged of two shorter ones, so that
the list says all merges: a token's parts are what the merges before it leave of its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import CheckpointError

END = "<|endoftext|>"
MAX_TOKEN = 1024  # bytes
NAMED = {name: END for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
# What a text is cut into words by, as GPT-2's authors and Whisper's do it.
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def as_bytes(words: Iterable[str], file_name: str) -> list[bytes]:
    """Returns the bytes of words in GPT-2's alphabet. Raises CheckpointError for others."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    back = {char: byte for byte, char in bytes_to_unicode().items()}
    try:
        return [bytes(back[char] for char in word) for word in words]
    except KeyError as error:
        raise _no_way(file_name, f"has a token with {error.args[0]!a}, which is no byte") from None


def write_tokenizer(
    folder: Path, words: Sequence[bytes], specials: Sequence[str], file_name: str
) -> None:
    """Writes a tokenizer of these words, and special tokens with the ids after theirs. Raises
    CheckpointError where the words do not say how they were merged."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    names = ["".join(letters[byte] for byte in word) for word in words]
    vocabulary = {name: number for number, name in enumerate(names)}
    if len(vocabulary) < len(words):
        raise _no_way(file_name, "has a token twice")
    merges = [
        ["".join(letters[byte] for byte in part) for part in pair]
        for pair in _merges(words, file_name)
    ]
    model: dict[str, Any] = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": merges,
        "unk_token": None,
    }
    model |= {"dropout": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    values: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "post_processor": None,
    }
    values |= {"pre_tokenizer": BYTES, "decoder": BYTES, "model": {**model, "fuse_unk": False}}
    write_values(folder, values, specials, len(words))


def write_values(
    folder: Path, values: Mapping[str, Any], specials: Sequence[str], first: int
) -> None:
    """Writes tokenizer.json with the special tokens that it lacks. first: the id of the first
    one."""
    added = [*values["added_tokens"]]
    known = {token.get("content") for token in added} | values["model"]["vocab"].keys()
    for number, name in enumerate(specials, first):
        if name not in known:
            is_time = name[2:3].isdigit()  # times are shown, as transformers' tokenizers do
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": number, "content": name, **flags, "special": not is_time})
    text = json.dumps({**values, "added_tokens": added}, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _merges(words: Sequence[bytes], file_name: str) -> Iterator[tuple[bytes, bytes]]:
    ranks = {word: rank for rank, word in enumerate(words)}
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise _no_way(file_name, "has no token for some bytes")
    for rank, word in enumerate(words):
        if len(word) < 2:
            continue
        parts = _parts(word, ranks, rank) if len(word) <= MAX_TOKEN else []
        if len(parts) != 2:
            raise _no_way(file_name, f"has the token {word[:40]!r}, which no two earlier ones make")
        yield parts[0], parts[1]


def _parts(word: bytes, ranks: Mapping[bytes, int], limit: int) -> list[bytes]:
    """Returns what the merges before number `limit` leave of a word."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        pairs = (ranks.get(one + two, limit) for one, two in pairwise(parts))
        best, at = min((rank, at) for at, rank in enumerate(pairs))
        if best >= limit:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _no_way(file_name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the vocabulary in {file_name} {what}, so that no tokenizer can be made of it; add "
        "tokenizer.json to the folder, or give tokenizer='a folder with tokenizer.json'"
    )
