"""The checkpoint's own tokenizer, and the operations on it that intake needs."""

from __future__ import annotations

import inspect
import logging
import tempfile
import unicodedata
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from mmdeploy_llm.engine.intake.templates import Encoder
from mmdeploy_llm.engine.intake.templates.tokenizer_steps import check_steps
from mmdeploy_llm.errors import CheckpointError, RequestError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.system.guarding.folder_files import library_error, shown
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.byte_letters import BYTE_OF
from mmdeploy_llm.weights.folder import check_files
from mmdeploy_llm.weights.folder.gguf import has_tokenizer, tokenizer_file, without_additions
from mmdeploy_llm.weights.folder.text_sizes import text_config

from .unicode_text import check_unicode

logger = logging.getLogger(__name__)

MAX_WORD_LISTS = 16  # lists of bad_words whose ids are kept
RUST_PANIC = "PanicException"  # of pyo3: no Exception, and not importable


def load_own_tokenizer(checkpoint: Checkpoint) -> Any:
    """Loads transformers' tokenizer of a model; see load_tokenizer."""
    if checkpoint.model_file is None:
        return load_tokenizer(checkpoint.folder, next(iter(checkpoint.gguf_files), None))
    with tempfile.TemporaryDirectory(prefix="mmdeploy-llm-") as folder:
        checkpoint.model_file.write_tokenizer(Path(folder))
        return load_tokenizer(Path(folder))


def load_tokenizer(folder: Path, gguf_file: Path | None = None) -> Any:
    """Loads transformers' tokenizer from a model folder, without running code of the checkpoint.

    gguf_file: holds the tokenizer when the folder has no files of one.
    Raises CheckpointError when there is none that can be loaded.
    """
    if gguf_file is not None and not has_tokenizer(folder):
        with tokenizer_file(gguf_file) as alone:
            return without_additions(_load(alone, gguf_file.name))
    check_files(folder)
    return _load(folder)


def _load(folder: Path, gguf_file: str | None = None) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # The Auto class would also make a config of the GGUF file, of which it knows fewer families.
    loader = AutoTokenizer if gguf_file is None else PreTrainedTokenizerFast
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        loaded = loader.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, **options
        )
        check_steps(loaded)
        if "group_tokens" in inspect.signature(type(loaded)._decode).parameters:
            # It joins the same token twice in a row: right for frames of a sound, not for answers.
            loaded._decode = partial(loaded._decode, group_tokens=False)
        loaded("")  # some faults of tokenizer.json show only when it is used
    except CheckpointError:
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and Rust panics
        if not isinstance(error, Exception) and type(error).__name__ != RUST_PANIC:
            raise
        raise CheckpointError(
            f"the tokenizer in {gguf_file or str(folder)!r} cannot be loaded: "
            f"{library_error(error)}\n"
            "The folder needs tokenizer.json, or give tokenizer='another folder'"
        ) from error
    return loaded


class PromptTokenizer:
    """Converts text to token ids and back, with the rules for prompts. Holds no state of requests.

    raw: the transformers tokenizer. Safe for use from several threads: nothing here changes its
        truncation or padding.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._encoder = None if check_steps(raw) else Encoder(raw.backend_tokenizer)
        self._lost, self._told = lost_bytes(raw), set[str]()  # characters that were warned of
        self._start_texts = self._read_start_texts()
        self._spelled = lru_cache(MAX_WORD_LISTS)(self._spell)

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a text prompt, with the tokenizer's own special tokens around it.

        They are left out when the text already starts with the begin-of-text token, as a rendered
        chat template does: a second one would disturb the model.
        """
        return self._encode(text, add_special_tokens=not text.startswith(self._start_texts))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text without adding special tokens."""
        return self._encode(text, add_special_tokens=False)

    def encode_pair(self, one: str, two: str) -> tuple[list[int], tuple[int, ...] | None]:
        """Returns the ids of two texts, joined with the tokenizer's separators, and the type of
        each token; None for a tokenizer without types."""
        for text in (one, two):
            check_unicode(text, "the prompt")
        try:
            found = self.raw(one, two, verbose=False)
        except Exception as error:  # tokenizers raises bare Exception
            raise RequestError(
                f"the tokenizer cannot read this pair: {library_error(error)}"
            ) from error
        types = found.get("token_type_ids")
        return list(found["input_ids"]), None if types is None else tuple(types)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included."""
        text = self.raw.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a text that is one token of the vocabulary, else None."""
        # Not the whole vocabulary, which tokenizers copy for each who asks.
        token_id: int | None = self.raw.convert_tokens_to_ids(token)
        is_known = token_id is not None and self.raw.convert_ids_to_tokens(token_id) == token
        return token_id if is_known else None  # of an unknown one it is that of "<unk>"

    def token_ids(self, text: str) -> tuple[int, ...] | None:
        """Returns the ids of a text that is one token of the vocabulary or consists of added
        tokens, which are never split or merged; else None."""
        token_id = self.token_id(text)
        if token_id is not None:
            return (token_id,)
        ids = tuple(self.encode(text))
        return ids if set(ids) <= set(self.raw.added_tokens_decoder) else None

    def banned(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Returns the id sequences that are never generated: those that spell bad words, at the
        start of a text or after a space, and single ids. Spelled words are kept for the prompts to
        come, which mostly have the same ones."""
        alone = ((token_id,) for token_id in params.bad_words_token_ids)
        return tuple(dict.fromkeys((*self._spelled(tuple(params.bad_words)), *alone)))

    def _spell(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        forms = (form for word in words for form in (word, f" {word}"))
        spelled = (tuple(self.encode(form)) for form in forms)
        return tuple(dict.fromkeys(ids for ids in spelled if ids))

    def interrupt(self) -> None:
        """Ends a call that is under way; later ones are refused where they need a process."""
        if self._encoder is not None:
            self._encoder.interrupt()

    def close(self) -> None:
        """Ends the process of a tokenizer that has one."""
        if self._encoder is not None:
            self._encoder.close()

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        check_unicode(text, "the prompt")
        if self._lost:
            self._check_lost(text)
        if self._encoder is not None:
            return self._encoder.encode(text, add_special_tokens=add_special_tokens)
        try:
            # verbose=False: no warning about long texts, because the length is checked later.
            ids = self.raw(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except BaseException as error:  # tokenizers raises bare Exception, and Rust panics
            if not isinstance(error, Exception) and type(error).__name__ != RUST_PANIC:
                raise
            raise RequestError(
                f"the tokenizer cannot read this text: {library_error(error)}"
            ) from error
        return list(ids)

    def _check_lost(self, text: str) -> None:
        """Raises RequestError for a character that the tokenizer would drop; warns of control
        characters, once of each, which mean nothing to a model."""
        data = text.encode()
        if len(data.translate(None, self._lost)) == len(data):
            return
        for char in dict.fromkeys(text):
            if not set(char.encode()) & set(self._lost):
                continue
            if unicodedata.category(char) != "Cc":
                raise RequestError(
                    f"the tokenizer has no token for {char!r} (U+{ord(char):04X}) and would leave "
                    "it out; replace it in the prompt"
                )
            if char not in self._told:
                self._told.add(char)
                logger.warning(
                    "the tokenizer has no token for the control character U+%04X, which prompts "
                    "lose",
                    ord(char),
                )

    def _read_start_texts(self) -> tuple[str, ...]:
        """Returns the texts that mark the start: BOS, CLS, and what the tokenizer puts first."""
        try:
            added = self._encode("", add_special_tokens=True)[:1]
        except RequestError as error:
            raise CheckpointError(f"the tokenizer reads no text: {error}") from error
        names = [self.raw.bos_token, self.raw.cls_token, *self.raw.convert_ids_to_tokens(added)]
        return tuple({str(name) for name in names if name})


def lost_bytes(raw: Any) -> bytes:
    """Returns the bytes of UTF-8 that a tokenizer drops: those that a byte-level BPE without an
    unknown token has no token for. SmolLM2's lacks 21 of 256."""
    backend: Any = getattr(raw, "backend_tokenizer", None)
    model: Any = getattr(backend, "model", None)
    if type(model).__name__ != "BPE" or model.unk_token is not None or model.byte_fallback:
        return b""
    if "ByteLevel" not in f"{backend.pre_tokenizer!r} {backend.normalizer!r}":
        return b""
    return bytes(byte for name, byte in BYTE_OF.items() if backend.token_to_id(name) is None)


def eos_token_ids(checkpoint: Checkpoint, tokenizer: PromptTokenizer) -> frozenset[int]:
    """Returns the end-of-sequence ids of generation_config.json, else config.json, else the
    tokenizer; of the last two only those of the vocabulary, see check_eos. Raises CheckpointError
    for another one in generation_config.json."""
    if checkpoint.generation.get("eos_token_id") is not None:
        check_eos(checkpoint, tokenizer)
    size = text_config(checkpoint).vocab_size
    _, ids = _given_eos(checkpoint, tokenizer)
    return frozenset(token_id for token_id in ids if _is_id(token_id, size))


def check_eos(checkpoint: Checkpoint, tokenizer: PromptTokenizer) -> None:
    """Raises CheckpointError for an end-of-sequence id that is not in the vocabulary. For models
    that generate: SigLIP's config class has such an id by default, and nothing that needs it."""
    size = text_config(checkpoint).vocab_size
    source, ids = _given_eos(checkpoint, tokenizer)
    for token_id in ids:
        if not _is_id(token_id, size):
            raise CheckpointError(
                f"'eos_token_id' in {source} of the model is {shown(token_id)}; allowed: 0 to "
                f"{size - 1}, the ids of its vocabulary"
            )


def _given_eos(checkpoint: Checkpoint, tokenizer: PromptTokenizer) -> tuple[str, tuple[Any, ...]]:
    sources = (
        ("generation_config.json", checkpoint.generation.get("eos_token_id")),
        ("config.json", getattr(text_config(checkpoint), "eos_token_id", None)),
        ("the tokenizer", tokenizer.raw.eos_token_id),
    )
    source, given = next(((name, ids) for name, ids in sources if ids is not None), ("", ()))
    return source, tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _is_id(token_id: Any, vocab_size: int) -> bool:
    return type(token_id) is int and 0 <= token_id < vocab_size
