"""Rules of the tokenizer: begin-of-text tokens, bad words, faulty files."""

import json
import logging

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mmdeploy_llm.engine.intake.tokenizer import PromptTokenizer, load_tokenizer, lost_bytes
from mmdeploy_llm.errors import CheckpointError, RequestError


def test_no_second_begin_of_text(bos_tokenizer):
    tokenizer = PromptTokenizer(bos_tokenizer)
    begin, hello = tokenizer.encode("<s>"), tokenizer.encode("hello")
    assert tokenizer.encode_prompt("hello") == begin + hello
    assert tokenizer.encode_prompt("<s>hello") == begin + hello
    assert tokenizer.encode_prompt("<|begin|>hello") == tokenizer.encode("<|begin|>") + hello
    assert tokenizer.encode_prompt("hello<s>") == begin + hello + begin


def test_a_tokenizer_without_begin_of_text_adds_none(tokenizer, raw_tokenizer):
    for text in ("hello", "<s>hello", ""):
        assert tokenizer.encode_prompt(text) == raw_tokenizer(text)["input_ids"]


def test_ids_equal_transformers_and_decode_gives_the_text(tokenizer, raw_tokenizer):
    text = "Zwölf <|start|> 日本 words </think>\n"
    assert tokenizer.encode(text) == raw_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_texts_give_no_warning(raw_tokenizer):
    raw_tokenizer.model_max_length, before = 5, raw_tokenizer.model_max_length
    try:
        assert len(PromptTokenizer(raw_tokenizer).encode("hello world " * 10)) > 5
    finally:
        raw_tokenizer.model_max_length = before


def test_loading(tmp_path, raw_tokenizer):
    raw_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.get_vocab() == raw_tokenizer.get_vocab()
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"needs tokenizer.json"):
        load_tokenizer(tmp_path)


def without_bytes(tokenizer, lost):
    """Returns a copy of a tokenizer whose vocabulary has no tokens for these bytes."""
    content = json.loads(tokenizer.raw.backend_tokenizer.to_str())
    spelled = {chr(byte) if 33 <= byte < 127 else BYTE_NAMES[byte] for byte in lost}
    model = content["model"]
    model["merges"] = [own for own in model["merges"] if not spelled & set("".join(own))]
    model["vocab"] = {own: n for own, n in model["vocab"].items() if not spelled & set(own)}
    return PromptTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    )


# As GPT-2's encoder.py orders them: bytes that are not printed follow from U+0100 on.
BYTE_NAMES = {0: "Ā", 11: "ċ", 0x82: "Ĥ", 0xC3: "Ã", 0xF0: "ð"}


def test_no_byte_is_lost_by_most(tokenizer):
    assert lost_bytes(tokenizer.raw) == b""
    assert tokenizer.decode(tokenizer.encode("a\x0b é \U0001f600")) == "a\x0b é \U0001f600"


@pytest.mark.parametrize(
    ("lost", "text", "shown"),
    [
        (b"\xf0", "smile \U0001f600", r"'\U0001f600' \(U\+1F600\)"),
        (b"\xc3", "Zw\xf6lf", r"'\xf6' \(U\+00F6\)"),
        (b"\x82", "5 \u20ac", r"'\u20ac' \(U\+20AC\)"),  # one of three bytes
        (b"#", "a # b", r"'#' \(U\+0023\)"),
    ],
)
def test_characters_that_would_be_lost_are_refused(tokenizer, lost, text, shown):
    own = without_bytes(tokenizer, lost)
    dropped = own.raw(text, add_special_tokens=False)["input_ids"]
    assert own.decode(dropped) != text  # transformers says nothing
    assert lost_bytes(own.raw) == lost
    with pytest.raises(RequestError, match=f"no token for {shown} and would leave it out"):
        own.encode(text)
    assert own.decode(own.encode("a red circle")) == "a red circle"


def test_control_characters_that_are_lost_are_told_once(tokenizer, caplog):
    own = without_bytes(tokenizer, b"\0\x0b")
    with caplog.at_level(logging.WARNING):
        for text in ("a\x0bb", "c\x0bd", "e\0f"):
            assert own.decode(own.encode(text)) == text[0] + text[2]
    assert ["U+000B" in each.message for each in caplog.records] == [True, False]
    assert len(caplog.records) == 2
