"""What families want of answers where a request does not say otherwise."""

import logging

import pytest
from mmdeploy_llm_plugins import glm, paddleocr

from mmdeploy_llm import LLM, SamplingParams

READERS = {
    spec.name: spec
    for plugin in (glm, paddleocr)
    for spec in plugin.provide_models()
    if "ocr" in spec.name
}


@pytest.mark.parametrize("name", ["glm_ocr", "paddleocr_vl"])
def test_readers_of_documents_do_not_run_in_loops(name):
    own = SamplingParams(**READERS[name].sampling).no_repeat_ngram
    assert (own.size, own.window) == (30, 90)
    assert any("td" in text or "cel" in text for text in own.may_repeat)


def test_no_other_family_is_changed():
    others = {spec.name: spec.sampling for spec in glm.provide_models() if "ocr" not in spec.name}
    assert set(map(len, others.values())) == {0}


@pytest.mark.full
def test_it_is_told_and_can_be_switched_off(tiny_folder, caplog):
    """A bias forces a token, which is a loop of one."""
    loop = {"temperature": 0, "max_tokens": 50, "ignore_eos": True, "logit_bias": {9: 100.0}}
    folder = str(tiny_folder("paddleocr_vl"))
    with caplog.at_level(logging.INFO), LLM(folder, max_model_len=256, use_warmup=False) as llm:
        params = [SamplingParams(**loop), SamplingParams(**loop, no_repeat_ngram=False)]
        usual, off = llm.generate([[1, 2, 3]] * 2, params, use_tqdm=False)
    assert "usual for paddleocr_vl" in caplog.text
    assert list(usual.outputs.token_ids[:31]).count(9) == 30
    assert off.outputs.token_ids == [9] * 50
