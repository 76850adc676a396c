"""Texts of more tokens than a model reads: cut as by transformers' tokenizers, or in windows."""

import pytest
import transformers
from mmdeploy_llm_plugins.bert import tiny

from mmdeploy_llm.engine.intake.fitting import Long, long_text
from mmdeploy_llm.engine.intake.tokenizer import PromptTokenizer
from mmdeploy_llm.errors import PromptTooLongError
from mmdeploy_llm.testing.tiny import write_family

TEXT = "the quick brown fox, it jumps over a lazy dog; hello there " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its tokenizer puts [CLS] and [SEP] around a text."""
    folder = tmp_path_factory.mktemp("bert")
    write_family(tiny.BERT, folder)
    return folder


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [3, 4, 17, 64])
@pytest.mark.parametrize("prefix", ["", "find: "])
def test_a_cut_text_is_that_of_transformers(folder, side, most, prefix):
    raw = transformers.AutoTokenizer.from_pretrained(folder, truncation_side=side)
    found = long_text(PromptTokenizer(raw), prefix, TEXT, "", most)
    if side == "right" and prefix and most < len(raw(prefix)["input_ids"]) + 1:
        with pytest.raises(PromptTooLongError, match="no room for a text"):
            found.cut(at_start=False)
        return
    expected = raw(prefix + TEXT, truncation=True, max_length=most)["input_ids"]
    assert list(found.cut(at_start=side == "left")) == expected


@pytest.mark.parametrize(("prefix", "suffix"), [("", ""), ("find: ", ""), ("a: ", " of what?")])
def test_windows_have_every_token_once_and_all_the_instruction(folder, prefix, suffix):
    raw = transformers.AutoTokenizer.from_pretrained(folder)
    found = long_text(PromptTokenizer(raw), prefix, TEXT, suffix, 40)
    before, after = list(found.before), list(found.after)
    bodies = []
    for window in map(list, found.windows()):
        assert len(window) <= 40
        assert (window[: len(before)], window[-len(after) :]) == (before, after)
        bodies += window[len(before) : -len(after)]
    whole = raw(prefix + TEXT + suffix)["input_ids"]
    assert [*before, *bodies, *after] == whole
    assert (before[0], after[-1]) == (raw.cls_token_id, raw.sep_token_id)


def test_a_text_that_fits_is_left_alone(folder):
    raw = transformers.AutoTokenizer.from_pretrained(folder)
    count = len(raw(TEXT)["input_ids"])
    assert long_text(PromptTokenizer(raw), "", TEXT, "", count) is None
    assert long_text(PromptTokenizer(raw), "", TEXT, "", count - 1) is not None


def test_the_last_window_is_shorter():
    own = Long(before=(1,), body=(5, 6, 7, 8, 9), after=(2,), num_own=1, most=4)
    assert own.windows() == ((1, 5, 6, 2), (1, 7, 8, 2), (1, 9, 2))
