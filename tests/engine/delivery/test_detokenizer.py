"""Incremental detokenization equals the tokenizer's own decoding of the whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mmdeploy_llm.engine.delivery.detokenizer import Detokenizer, Vocabulary

REPLACEMENT = "\ufffd"


def pieces_of(
    tokenizer: Any, token_ids: list[int], is_cut: bool = False, **options: Any
) -> list[str]:
    """Returns every delta for ids that arrive one by one, and the rest from `finish`."""
    detokenizer = Detokenizer(Vocabulary(tokenizer), **options)
    deltas = [detokenizer.push([token_id]) for token_id in token_ids]
    return [*deltas, detokenizer.finish(is_cut=is_cut)]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("skips", [True, False])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_deltas_are_the_whole_decode(tokenizer: Any, skips: bool, data: st.DataObject) -> None:
    ids = st.integers(0, len(tokenizer) + 5)  # ids past the end of the vocabulary too
    bytes_mostly = st.integers(100, 300) if len(tokenizer) > 256 else ids
    chunks = data.draw(st.lists(st.lists(ids | bytes_mostly, max_size=12), max_size=12))
    whole = [token_id for chunk in chunks for token_id in chunk]
    detokenizer = Detokenizer(Vocabulary(tokenizer), skip_special_tokens=skips)
    text = "".join(detokenizer.push(chunk) for chunk in chunks)
    assert text + detokenizer.finish(is_cut=False) == (
        expected := tokenizer.decode(whole, skip_special_tokens=skips)
    )
    cut = "".join(pieces_of(tokenizer, whole, is_cut=True, skip_special_tokens=skips))
    assert cut == expected or expected.endswith(REPLACEMENT)


def encode_bytes(tokenizer: Any, data: bytes) -> list[int]:
    """One token for each byte of byte-level BPE."""
    of_byte = bytes_to_unicode()
    return tokenizer.convert_tokens_to_ids([of_byte[byte] for byte in data])


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        "你好世界",
        "😀👩\u200d👩\u200d👧🏽",
        "e\u0301a\u0308 नमस्ते",
        "a\u00a0b\n\n",
        "\ufffdreal\ufffd",
    ],
)
def test_byte_tokens_never_show_half_a_character(byte_level: Any, text: str) -> None:
    deltas = pieces_of(byte_level, encode_bytes(byte_level, text.encode()))
    assert "".join(deltas) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in delta for delta in deltas)
        assert deltas[-1] == ""  # nothing was held back longer than needed


def fallback_bytes(tokenizer: Any, data: bytes) -> list[int]:
    """One token for each byte of byte fallback."""
    return tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data])


# Characters of 2, 3 and 4 bytes, the first and the last of each length among them.
LONG = ["é", "\x80", "\u07ff", "你", "\u0800", "\ud7ff", "\uffff", "🦜", "\U00010000", "\U0010ffff"]


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("encode", [encode_bytes, fallback_bytes])
@pytest.mark.parametrize("char", LONG)
def test_a_cut_character_is_left_out(
    byte_level: Any, llama_like: Any, encode: Any, char: str, skips: bool
) -> None:
    """After nothing, after another character, after itself, and after a real U+FFFD; at each byte,
    token by token and at once."""
    tokenizer = byte_level if encode is encode_bytes else llama_like
    for before in ("", "a", "好", char, REPLACEMENT):
        data = (before + char).encode()
        for end in range(len(data) + 1):
            ids, expected = encode(tokenizer, data[:end]), data[:end].decode("utf-8", "ignore")
            deltas = pieces_of(tokenizer, ids, is_cut=True, skip_special_tokens=skips)
            assert "".join(deltas) == expected
            at_once = Detokenizer(Vocabulary(tokenizer), skip_special_tokens=skips)
            assert at_once.push(ids) + at_once.finish(is_cut=True) == expected


def test_only_what_could_have_become_a_character_is_left_out(byte_level: Any) -> None:
    """Wrong bytes are no cut: one that begins nothing, a surrogate, one past U+10FFFF, one that is
    too long for its character."""
    for wrong in (b"\x80", b"\xff", b"\xc0", b"\xed\xa0", b"\xf4\x90", b"\xe0\x80"):
        ids = encode_bytes(byte_level, b"a" + wrong)
        expected = (b"a" + wrong).decode("utf-8", "replace")
        assert "".join(pieces_of(byte_level, ids, is_cut=True)) == expected
        beside = encode_bytes(byte_level, b"a" + wrong + b"\xf0\x9f")
        assert "".join(pieces_of(byte_level, beside, is_cut=True)) == expected


def test_a_token_that_ends_inside_a_character_keeps_what_is_before(byte_level: Any) -> None:
    (ends_inside,) = byte_level.convert_tokens_to_ids(
        ["".join(map(bytes_to_unicode().get, b"\x80\xe4"))]
    )
    ids = [*encode_bytes(byte_level, "€".encode()[:2]), *encode_bytes(byte_level, b"\xac")]
    assert "".join(pieces_of(byte_level, [*ids, ends_inside], is_cut=True)) == "€\ufffd"
    first = encode_bytes(byte_level, "\u0080".encode()[:1])
    assert "".join(pieces_of(byte_level, [*first, ends_inside], is_cut=True)) == "\u0080"
    assert "".join(pieces_of(byte_level, [*first, ends_inside])) == "\u0080\ufffd"


def test_a_real_replacement_character_stays(tokenizer: Any) -> None:
    """The same holds where it is one token, and where it is three bytes."""
    for ids in (
        [tokenizer.convert_tokens_to_ids(REPLACEMENT)],
        encode_bytes(tokenizer, b"\xef\xbf\xbd"),
    ):
        if None not in ids and REPLACEMENT in tokenizer.decode(ids):
            assert "".join(pieces_of(tokenizer, ids, is_cut=True)) == tokenizer.decode(ids)


def test_special_tokens_do_not_part_a_character_unless_they_are_shown(byte_level: Any) -> None:
    (eos,) = byte_level.convert_tokens_to_ids(["<eos>"])
    head, tail = (
        encode_bytes(byte_level, "🦜".encode()[:2]),
        encode_bytes(byte_level, "🦜".encode()[2:]),
    )
    assert "".join(pieces_of(byte_level, [*head, eos, *tail], is_cut=True)) == "🦜"
    assert "".join(pieces_of(byte_level, [*head, eos], is_cut=True)) == ""
    shown = pieces_of(byte_level, [*head, eos], is_cut=True, skip_special_tokens=False)
    assert "".join(shown) == "\ufffd<eos>"
    shown = pieces_of(byte_level, [eos, *head], is_cut=True, skip_special_tokens=False)
    assert "".join(shown) == "<eos>"


def test_a_run_of_wrong_bytes_stays_one_window_long(byte_level: Any) -> None:
    detokenizer = Detokenizer(Vocabulary(byte_level))
    (wrong,) = encode_bytes(byte_level, b"\x80")
    shown = "".join(detokenizer.push([wrong]) for _ in range(3000))
    assert len(shown) == 2999
    assert len(detokenizer._window) <= 25


def test_the_window_is_bounded_for_any_text(tokenizer: Any) -> None:
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    rng = random.Random(7)
    lengths = []
    for _ in range(3000):
        detokenizer.push([rng.randrange(len(tokenizer))])
        if len(detokenizer._window) > 25:  # only a run of byte-fallback tokens may do this
            assert detokenizer._window[-1] in detokenizer._vocabulary.byte_ids
        lengths.append(len(detokenizer._window))
    assert lengths[-1] < 200


def test_one_wrong_byte_spoils_a_run_of_byte_tokens_only_at_its_end(llama_like: Any) -> None:
    ids = llama_like.convert_tokens_to_ids
    good = ids(["a", "<0xE4>", "<0xBD>", "<0xA0>", "b"])
    assert pieces_of(llama_like, good) == ["a", "", "", "", "你b", ""]
    wrong = ids(["a", "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>", "b"])
    assert (
        "".join(pieces_of(llama_like, wrong))
        == llama_like.decode(wrong)
        == "a" + "\ufffd" * 4 + "b"
    )


def test_only_the_first_space_is_stripped(llama_like: Any) -> None:
    ids = llama_like.convert_tokens_to_ids(["<eos>", "▁the", "<eos>", "▁a", "▁", "▁Paris"])
    assert pieces_of(llama_like, ids) == ["", "the", "", " a", " ", " Paris", ""]


def test_markers_are_kept_when_special_tokens_are_skipped(byte_level: Any) -> None:
    ids = byte_level.convert_tokens_to_ids(["He", "</think>", "llo", "<eos>", "<think>"])
    text = "".join(pieces_of(byte_level, ids, markers=("</think>", "<no such token>")))
    assert text == "He</think>llo"
    assert "".join(pieces_of(byte_level, ids)) == "Hello"
    shown = "".join(pieces_of(byte_level, ids, skip_special_tokens=False))
    assert shown == "He</think>llo<eos><think>"


def test_text_of_a_token_keeps_its_space(llama_like: Any, byte_level: Any) -> None:
    vocabulary = Vocabulary(llama_like)
    of = {
        token: vocabulary.text_of(llama_like.convert_tokens_to_ids(token))
        for token in ("▁the", "a")
    }
    assert of == {"▁the": " the", "a": "a"}
    assert Vocabulary(byte_level).text_of(byte_level.convert_tokens_to_ids("<eos>")) == "<eos>"
    assert Vocabulary(byte_level).text_of(encode_bytes(byte_level, b"\xe4")[0]) == REPLACEMENT
