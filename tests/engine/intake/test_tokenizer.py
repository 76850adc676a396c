"""Rules of the tokenizer: begin-of-text tokens, bad words, faulty files."""

import pytest

from mmdeploy_llm.engine.intake.tokenizer import PromptTokenizer, load_tokenizer
from mmdeploy_llm.errors import CheckpointError


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
