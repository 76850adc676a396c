"""Tokenizers built in memory, and a request with updates as the scheduler makes them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mmdeploy_llm.request import Request
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import TokenUpdate

SPECIAL = ("<eos>", "<think>", "</think>", "<pad>")


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens(["<tag>", "你们"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte, and tokens that start or end inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_byte = bytes_to_unicode()
    words = [b" the", b" a", b"He", b"llo", "你".encode(), "你".encode()[:2], b"\xbd\xa0\xe5\xa5"]
    words += ["é".encode(), "e\u0301".encode(), "😀".encode()[:3], b"\x80\xe4", b"  ", b"\n"]
    tokens = alphabet + ["".join(of_byte[byte] for byte in word) for word in words]
    vocab = {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend)


PIECES = ["▁", "▁▁", "▁the", "▁a", "He", "llo", ".", "你", "好", "▁é", "e", "\u0301", "\ufffd"]
PIECES += ["a", "b", "ab", "abc", "▁Paris"]


def _byte_fallback(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoder
    return _wrap(backend)


@pytest.fixture(scope="session")
def llama_like() -> PreTrainedTokenizerFast:
    """Byte fallback, with one space stripped from the start."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _byte_fallback(decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)]))


@pytest.fixture(scope="session")
def metaspace() -> PreTrainedTokenizerFast:
    """Byte fallback after a Metaspace decoder, which treats the first token differently."""
    parts = [decoders.ByteFallback(), decoders.Metaspace()]
    return _byte_fallback(decoders.Sequence(parts))


@pytest.fixture(scope="session")
def word_piece() -> PreTrainedTokenizerFast:
    """Words joined by spaces; pieces that start with "##" are joined without."""
    tokens = ["[UNK]", "the", "cat", "##s", "##ly", "##", ".", "你", "a", "b"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return _wrap(backend)


@pytest.fixture(params=["byte_level", "llama_like", "metaspace", "word_piece"], scope="session")
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    """Each kind of tokenizer."""
    found: PreTrainedTokenizerFast = request.getfixturevalue(request.param)
    return found


class Generation:
    """A request whose tokens arrive step by step; updates the request as the scheduler does."""

    def __init__(self, **fields: object) -> None:
        params = fields.pop("params", None) or SamplingParams(max_tokens=1000)
        values = {
            "request_id": "r",
            "prompt": {"prompt": "hi"},
            "prompt_token_ids": [1, 2, 3],
            "eos_token_ids": frozenset(),
            "arrival_time": 100.0,
            "preprocess_end_time": 100.5,
        }
        self.request = Request(params=params, **{**values, **fields})

    def update(
        self, token_ids: Sequence[int] = (), reason: str | None = None, **fields: object
    ) -> TokenUpdate:
        """Returns the next update, after changing the request as commit does."""
        request = self.request
        now = 101.0 + len(request.output_token_ids)
        if request.inference_start_time is None:
            request.inference_start_time = 101.0
        if token_ids:
            request.output_token_ids += token_ids
            request.first_token_time = request.first_token_time or now + 1
            request.last_token_time = 101.0 + len(request.output_token_ids)
        return TokenUpdate(
            request=request, new_token_ids=tuple(token_ids), finish_reason=reason, **fields
        )


@pytest.fixture(scope="session")
def generation() -> type[Generation]:
    """The class, for tests that build their own."""
    return Generation
