"""The stand-in of a tokenizer reads and writes texts as transformers' tokenizer does."""

from __future__ import annotations

import copy
import json
import random

import pytest
import transformers
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmdeploy_llm.engine.intake.tokenizer import PromptTokenizer, load_tokenizer
from mmdeploy_llm.engine.startup.parse_cache.stand_in import Source, own_of
from mmdeploy_llm.engine.startup.parse_cache.tokenizer import describe_tokenizer, tokenizer_stand_in
from mmdeploy_llm.weights.cache import NotKeptError

TEXTS = (
    "",
    "Hello there,   world\n\n\tIt's 12,345 \u00fcber \u4f60\u597d \U0001f600 \u200d",
    "<|im_start|>user\nhi<|im_end|><s></s><pad><unk>",
    "a" * 3000,
)


def stands_in(tokenizer):
    source = Source(lambda: tokenizer)
    values = json.loads(json.dumps(describe_tokenizer(tokenizer)))
    return tokenizer_stand_in(values, source), source


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    return load_tokenizer(tiny_folder("qwen2"))


@pytest.fixture
def pair(loaded):
    return stands_in(loaded)


@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "ernie4_5_moe",
        *(pytest.param(f, marks=pytest.mark.full) for f in ("gemma3_text", "llama", "bert")),
    ],
)
def test_it_answers_as_the_tokenizer(tiny_folder, family):
    tokenizer = load_tokenizer(tiny_folder(family))
    found, source = stands_in(tokenizer)
    own, other = PromptTokenizer(found), PromptTokenizer(tokenizer)
    rng = random.Random(0)
    for _ in range(20):
        ids = [rng.randrange(len(tokenizer)) for _ in range(30)]
        assert own.decode(ids) == other.decode(ids)
    for text in TEXTS:
        assert own.encode(text) == other.encode(text)
        assert own.encode_prompt(text) == other.encode_prompt(text)
        assert own.token_id(text) == other.token_id(text)
        assert own.token_ids(text) == other.token_ids(text)
    assert found.get_vocab() == tokenizer.get_vocab()
    assert len(found) == len(tokenizer)
    for name in (
        "all_special_ids",
        "special_tokens_map",
        "chat_template",
        "eos_token",
        "pad_token_id",
    ):
        assert getattr(found, name) == getattr(tokenizer, name)
    assert found.convert_tokens_to_ids("no such token") == tokenizer.convert_tokens_to_ids(
        "no such token"
    )
    assert not source.is_loaded
    assert own.encode_pair("a b", "c") == other.encode_pair("a b", "c")
    assert source.is_loaded


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "ask",
    [
        lambda own: own(["a", "b c"])["input_ids"],
        lambda own: own("a", return_tensors="pt")["input_ids"].tolist(),
        lambda own: own.decode([5, 6, 7]),
        lambda own: own.decode(5, clean_up_tokenization_spaces=False),
        lambda own: own.batch_decode([[5], [6]]),
        lambda own: own.convert_ids_to_tokens([1, 2, 3], skip_special_tokens=True),
        lambda own: own.tokenize("a b"),
        lambda own: isinstance(own, PreTrainedTokenizerFast),
        lambda own: type(copy.deepcopy(own)),
        lambda own: own.init_kwargs.keys(),
    ],
)
def test_everything_else_asks_transformers(pair, loaded, ask):
    found, source = pair
    assert bool(found)
    assert not source.is_loaded
    assert ask(found) == ask(loaded)
    assert source.is_loaded


def test_tokens_that_are_added_are_read(loaded):
    own = copy.deepcopy(loaded)
    found, _ = stands_in(own)
    found.add_tokens(["<new token>"], special_tokens=True)
    assert len(found) == len(loaded) + 1
    assert found("a<new token>")["input_ids"][-1] == found.get_vocab()["<new token>"]
    assert found.backend_tokenizer is own.backend_tokenizer
    assert own_of(found).source.is_loaded


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs).upper()


def backend(**parts):
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.mark.parametrize("case", ["class", "slow", "expression"])
def test_tokenizers_with_ways_of_their_own_are_not_kept(case, tmp_path):
    if case == "class":
        found = Shouting(tokenizer_object=backend())
    elif case == "expression":
        steps = normalizers.Replace(Regex("(a+)+$"), "b")
        found = PreTrainedTokenizerFast(tokenizer_object=backend(normalizer=steps))
    else:
        found = transformers.ByT5Tokenizer()
    with pytest.raises(NotKeptError):
        describe_tokenizer(found)


def test_truncation_and_padding_of_a_file_are_not_applied():
    own = backend()
    own.enable_truncation(2)
    own.enable_padding(length=9)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="[UNK]")
    found, _ = stands_in(tokenizer)
    assert found("a b a b")["input_ids"] == tokenizer("a b a b")["input_ids"] == [0, 1, 0, 1]


@pytest.mark.parametrize("splits", [True, False])
def test_special_tokens_are_split_as_asked(splits):
    own = backend()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="[UNK]", split_special_tokens=splits
    )
    found, _ = stands_in(tokenizer)
    assert found("a [UNK] b")["input_ids"] == tokenizer("a [UNK] b")["input_ids"]
