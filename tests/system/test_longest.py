"""A model that says how many tokens of a sequence it computes."""

import pytest
from mmdeploy_llm_plugins.llama.text import LlamaForCausalLM

from mmdeploy_llm import LLM, ConfigError, SamplingParams


@pytest.fixture
def folder(tiny_folder, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "max_positions", 40, raising=False)
    return str(tiny_folder("llama"))


def test_a_longer_prompt_is_an_error_of_its_own(folder):
    prompts = [{"prompt_token_ids": [5] * count} for count in (40, 39, 3)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with LLM(folder, block_size=8) as llm:
        long, full, short = llm.generate(prompts, params, use_tqdm=False)
    assert "max_model_len(40)" in long.error_msg
    assert [len(output.outputs.token_ids) for output in (full, short)] == [1, 37]


def test_a_user_who_asks_for_more_is_told(folder):
    with pytest.raises(ConfigError, match="computes sequences of at most 40 tokens"):
        LLM(folder, max_model_len=41)
