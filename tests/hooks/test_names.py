import pytest

from mmdeploy_llm.hooks.names import (
    did_you_mean,
    error_text,
    listing,
    normalise,
)
from mmdeploy_llm.values.text.display import MAX_ERROR_LENGTH


@pytest.mark.parametrize("name", ["ernie-45-vl", "ernie_45_vl", "Ernie_45-VL", " ernie-45-vl "])
def test_normalise(name):
    assert normalise(name) == "ernie-45-vl"


def test_did_you_mean_gives_the_name_as_it_is_written():
    assert did_you_mean("QWEN_3x", ["Qwen_3", "llama"]) == "; did you mean 'Qwen_3'?"
    assert did_you_mean("zzz", ["Qwen_3", "llama"]) == ""
    assert did_you_mean("x", []) == ""


def test_listing():
    assert listing(["b", "a", "b"]) == "a, b"
    assert listing([]) == "none"


def test_error_text_has_no_memory_addresses():
    class Thing:
        pass

    text = error_text(TypeError(f"cannot use {Thing()!r} here"))
    assert text.startswith("TypeError: cannot use <")
    assert text.endswith("Thing object> here")
    assert "0x" not in text


def test_error_text_of_awkward_exceptions():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no")

    assert error_text(Mute()) == "Mute: (its message cannot be shown)"
    assert error_text(ValueError()) == "ValueError"
    assert error_text(SystemExit(3)) == "SystemExit: 3"
    assert len(error_text(ValueError("x" * 10**6))) == MAX_ERROR_LENGTH
