"""A key that transformers' config declares and a family does not read is refused by name, and what
published configs say is read: the defaults of transformers' classes."""

import importlib

import pytest
from mmdeploy_llm_plugins.ernie import text as ernie
from mmdeploy_llm_plugins.gemma import text as gemma
from mmdeploy_llm_plugins.glm import text as glm_text
from mmdeploy_llm_plugins.glm import vl as glm
from mmdeploy_llm_plugins.gptoss import text as gptoss
from mmdeploy_llm_plugins.granite import hybrid as granite
from mmdeploy_llm_plugins.internvl import text as internvl
from mmdeploy_llm_plugins.lfm import text as lfm
from mmdeploy_llm_plugins.olmo import text as olmo
from mmdeploy_llm_plugins.qwen import hybrid, text, vl3

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import config_reader, rotary_config


def qwen2(config):
    return text.decoder_config(config, is_tied=False)


def qwen3(config):
    return text.qwen3_decoder_config(config, is_tied=False)


def qwen35(config):
    return hybrid.hybrid_decoder(config, rotary_config(config), is_tied=False)


def of_internvl(config):
    return internvl.decoder_config(config, is_tied=False)


ROPE = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
GLM = {"text_config": {"hidden_size": 512, "num_attention_heads": 4, "rope_parameters": ROPE}}
LFM = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
FAMILIES = [
    ("qwen2", "Qwen2Config", qwen2, {}),
    ("qwen2_moe", "Qwen2MoeConfig", qwen2, {}),
    ("qwen2_vl", "Qwen2VLTextConfig", qwen2, {}),
    ("qwen2_5_omni", "Qwen2_5OmniTextConfig", qwen2, {}),
    ("qwen3", "Qwen3Config", qwen3, {}),
    ("qwen3_moe", "Qwen3MoeConfig", qwen3, {}),
    ("qwen3_omni_moe", "Qwen3OmniMoeTextConfig", qwen3, {}),
    ("qwen3_vl", "Qwen3VLConfig", vl3.Qwen3VLForConditionalGeneration.decoder_config, {}),
    ("qwen3_vl_moe", "Qwen3VLMoeConfig", vl3.Qwen3VLForConditionalGeneration.decoder_config, {}),
    ("qwen3_next", "Qwen3NextConfig", qwen35, {}),
    ("qwen3_5", "Qwen3_5TextConfig", qwen35, {}),
    ("qwen3_5_moe", "Qwen3_5MoeTextConfig", qwen35, {}),
    ("qwen3_moe", "Qwen3MoeConfig", of_internvl, {}),
    ("gpt_oss", "GptOssConfig", gptoss.decoder_config, {}),
    ("olmoe", "OlmoeConfig", olmo.decoder_config, {}),
    ("glm_ocr", "GlmOcrConfig", glm.decoder_config, {}),
    ("glm4_moe", "Glm4MoeConfig", glm_text.moe_decoder_config, {}),
    ("glm4v_moe", "Glm4vMoeConfig", glm.decoder_config, GLM),
    ("granitemoehybrid", "GraniteMoeHybridConfig", granite.decoder_config, {}),
    ("ernie4_5", "Ernie4_5Config", ernie.decoder_config, {}),
    ("ernie4_5_moe", "Ernie4_5_MoeConfig", ernie.decoder_config, {}),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextConfig", ernie.decoder_config, {}),
    ("lfm2", "Lfm2Config", lfm.decoder_config, {}),
    ("lfm2_moe", "Lfm2MoeConfig", lfm.decoder_config, LFM),
    ("gemma", "GemmaConfig", gemma.decoder_config, {}),
    ("gemma2", "Gemma2Config", gemma.decoder_config, {}),
    ("gemma3", "Gemma3TextConfig", gemma.decoder_config, {}),
]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("folder", "name", "build", "fields"),
    FAMILIES,
    ids=[f"{each[1]}{at}" for at, each in enumerate(FAMILIES)],
)
def test_only_a_key_that_nobody_reads_is_refused(folder, name, build, fields, monkeypatch):
    module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    config = getattr(module, name)(**fields)
    build(config)
    declared = config_reader.declared_keys
    monkeypatch.setattr(config_reader, "declared_keys", lambda each: declared(each) | {"acme_gate"})
    config.get_text_config().acme_gate = True
    with pytest.raises(ModelNotSupportedError, match="acme_gate = True"):
        build(config)
