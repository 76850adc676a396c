"""Decode steps of models that kernels compute whole are recorded, and have every bit of steps that
are computed layer by layer."""

import pytest
from mmdeploy_llm_plugins.decoders import CLASSES

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.layers.basic import recordings

PROMPTS = ([5, 9, 200, 31, 7], [40, 41, 42])
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)


def answers(folder):
    """Returns tokens with their log-probabilities, and whether each recorded step was recorded."""
    options = {"dtype": "bfloat16", "max_num_seqs": 2, "enable_logprob": True, "max_model_len": 128}
    with LLM(str(folder), use_warmup=False, **options) as llm:
        outputs = llm.generate([*PROMPTS], PARAMS, use_tqdm=False)
        known = list(llm.model.model._recordings.values())
    found = [(out.outputs.token_ids, out.outputs.logprobs) for out in outputs]
    return found, {own is not None for own in known}


WITH_EXPERTS = ("mixtral", "nemotron_h")
FAMILIES = (*CLASSES, "nemotron_h")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.full] * (name != "starcoder2")) for name in FAMILIES],
)
def test_recorded_steps_have_the_tokens_of_others(tiny_folder, monkeypatch, kernels, family):
    """But for experts on the portable level, where torch multiplies by their router."""
    found, are_recorded = answers(tiny_folder(family))
    assert are_recorded == {kernels.has_wide_registers or family not in WITH_EXPERTS}
    monkeypatch.setattr(recordings, "MAX_RECORDED_ROWS", 0)
    assert answers(tiny_folder(family)) == (found, set())
