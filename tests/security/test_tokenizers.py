"""A tokenizer.json that was made to hurt: steps without end, texts that grow, expressions that
never end, and what Rust panics at."""

import array
import contextlib
import threading
import time
from multiprocessing import Pipe

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mmdeploy_llm.engine.intake.templates import Encoder
from mmdeploy_llm.engine.intake.templates import encoder as encoder_module
from mmdeploy_llm.engine.intake.templates.tokenizer_steps import KNOWN, check_steps
from mmdeploy_llm.engine.intake.tokenizer import PromptTokenizer, load_tokenizer
from mmdeploy_llm.errors import CheckpointError, EngineError, RequestError
from mmdeploy_llm.system.processes import Channel, frames
from mmdeploy_llm.system.processes.process import READY

# The library gives up a match after ten million steps, but begins one at every letter.
HURTS, LETTERS = "a*a*x", "a" * 3000 + "bx"
WORDS = {"[UNK]": 0, "a": 1, "b": 2, "<s>": 3}


def raw(normalizer=None, pre_tokenizer=None, decoder=None):
    """Returns transformers' tokenizer with these steps."""
    backend = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    for name, part in (
        ("normalizer", normalizer),
        ("pre_tokenizer", pre_tokenizer),
        ("decoder", decoder),
    ):
        if part is not None:
            setattr(backend, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", bos_token="<s>")


def split(expression):
    return pre_tokenizers.Split(Regex(expression), behavior="isolated")


@pytest.fixture
def guarded():
    """A tokenizer with an expression that is no known one, and little time for it."""
    tokenizer = PromptTokenizer(raw(pre_tokenizer=split("(a+)+$|b")))
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize("expression", sorted(KNOWN))
def test_published_expressions_are_used_here(expression):
    assert check_steps(raw(pre_tokenizer=split(expression)))


def test_a_tokenizer_without_expressions_is_used_here(raw_tokenizer):
    assert check_steps(raw_tokenizer)
    assert check_steps(raw(pre_tokenizer=pre_tokenizers.Metaspace()))
    assert check_steps(object())  # one in Python, which is transformers' own code


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_an_unknown_expression_is_found_wherever_it_stands(part):
    replace = normalizers.Replace(Regex("(a|a)*x"), "")
    parts = {
        "normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Sequence([replace])]),
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Digits(), split("(a|a)*x")]),
    }
    assert not check_steps(raw(**{part: parts[part]}))


def test_ids_of_the_process_are_those_of_this_one(guarded):
    text = "b a b\n ab 漢字 \U0001f600" * 50
    plain = raw(pre_tokenizer=split("(a+)+$|b"))
    for add in (True, False):
        expected = plain(text, add_special_tokens=add)["input_ids"]
        assert guarded._encode(text, add_special_tokens=add) == expected
    assert guarded.encode("") == []


@pytest.mark.full
def test_an_expression_that_never_ends_is_that_texts_error():
    encoder = Encoder(raw(pre_tokenizer=split(HURTS)).backend_tokenizer, seconds=0.5)
    try:
        begin = time.monotonic()
        with pytest.raises(RequestError, match=r"did not read this text within 0\.5 s"):
            encoder.encode(LETTERS, add_special_tokens=False)
        assert time.monotonic() - begin < 60  # with the start of the process
        assert encoder.encode("b", add_special_tokens=False) == [2]
    finally:
        encoder.close()
    with pytest.raises(EngineError, match="closed"):
        encoder.encode("b", add_special_tokens=False)


@pytest.mark.full
def test_an_expression_that_the_library_gives_up_is_that_texts_error(guarded, capfd):
    with pytest.raises(RequestError, match=r"cannot read this text: .*retry-limit"):
        guarded.encode("a" * 40 + "!")
    assert guarded.encode("b") == [2]
    assert "backtrace" not in capfd.readouterr().err


@pytest.mark.full
def test_a_text_that_takes_all_memory_is_that_texts_error(monkeypatch):
    monkeypatch.setattr(encoder_module, "MAX_ANSWER", 2**28)
    grows = normalizers.Sequence([normalizers.Replace(Regex("x?"), "y" * 60)])
    encoder = Encoder(raw(normalizer=grows).backend_tokenizer, seconds=20)
    try:
        with pytest.raises(RequestError, match=r"ended the process|cannot read|within"):
            encoder.encode("a" * 20_000_000, add_special_tokens=False)
        assert encoder.encode("", add_special_tokens=False) is not None
    finally:
        encoder.close()


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"normalizer": normalizers.Sequence([normalizers.NFC()] * 65)}, "has 65 steps"),
        ({"normalizer": normalizers.Prepend("x" * 5000)}, "adds 5000 characters"),
        (
            {"normalizer": normalizers.Sequence([normalizers.Replace("a", "aa")] * 40)},
            r"up to 1\.1e\+12 times as long",
        ),
        ({"normalizer": normalizers.Replace("a", "b" * 100)}, "up to 100 times as long"),
        ({"decoder": decoders.Replace(Regex("(a+)+$"), "")}, "searches each token with"),
        ({"decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 40)}, "times as long"),
    ],
)
def test_steps_without_sense_are_refused_before_a_text_passes_them(tmp_path, parts, problem):
    raw(**parts).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(tmp_path)


def test_a_panic_is_that_texts_error(raw_tokenizer):
    class PanicException(BaseException):
        """Has the name of pyo3's exception, which cannot be imported."""

    class Panics:
        bos_token = cls_token = None

        def __call__(self, text, **options):
            if text:
                raise PanicException("index out of bounds")
            return {"input_ids": []}

        def convert_ids_to_tokens(self, ids):
            return []

    tokenizer = PromptTokenizer(Panics())
    with pytest.raises(RequestError, match=r"cannot read this text: .*index out of"):
        tokenizer.encode("b")


def answer(connection):
    return bytes(frames.receive(connection, seconds=60, max_buffer=2**20).buffers[0])


def test_the_process_in_a_thread_of_this_one(monkeypatch):
    """Its limits are left out: they would hold for the tests too."""
    for name in ("limit_memory", "set_limit", "drop_outputs"):
        monkeypatch.setattr(encoder_module, name, lambda *_: None)
    ours, theirs = Pipe()
    served = threading.Thread(target=serve_until_closed, args=(Channel(theirs, 0),))
    served.start()
    channel = Channel(ours, 0)
    channel.send((raw(pre_tokenizer=split("(a+)+$|b")).backend_tokenizer.to_str(), 5.0))
    assert frames.receive(ours, seconds=60, max_buffer=0).text == READY
    channel.send(("b b", False))
    assert answer(ours) == b"I" + array.array("I", [2, 0, 2]).tobytes()
    channel.send(("a" * 40 + "!", False))
    assert answer(ours).startswith(b"E")
    ours.close()
    served.join(60)
    assert not served.is_alive()


def serve_until_closed(channel):
    with contextlib.suppress(EOFError, OSError):
        encoder_module.serve(channel)
