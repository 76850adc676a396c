"""Qwen text models with windows, experts and head norms against transformers: see
testing.model_conformance."""

import pytest
from mmdeploy_llm_plugins.qwen import provide_models
from mmdeploy_llm_plugins.reasoning import provide_reasoning_parsers
from safetensors import safe_open

from mmdeploy_llm.testing.model_conformance import ModelConformance
from mmdeploy_llm.testing.tiny import write_tiny

SPECS = {spec.name: spec for spec in provide_models()}
TEXT_ONLY = {"text": (), "other text": ()}
WINDOW = {"use_sliding_window": True, "sliding_window": 6}


class TestQwenWindows(ModelConformance):
    """The upper layers have windows that are shorter than the prompt."""

    spec = SPECS["qwen2"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("qwen2", folder, seed=2, max_window_layers=1, **WINDOW)


class TestQwen2Moe(ModelConformance):
    """A dense layer, then experts whose weights are not normalised, and a gated shared expert."""

    spec = SPECS["qwen2_moe"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("qwen2_moe", folder)


class TestQwen2MoeVariant(ModelConformance):
    """Sparse layers at an interval, normalised weights, no biases, windows in every second layer, a
    tied head."""

    spec = SPECS["qwen2_moe"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        options = {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "tie_word_embeddings": True,
            "max_window_layers": 3,
        }
        write_tiny("qwen2_moe", folder, seed=1, **options, **WINDOW)


class TestQwen3(ModelConformance):
    """Norms on the heads of query and key; a head size that is not hidden / heads."""

    spec = SPECS["qwen3"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("qwen3", folder)


class TestQwen3Variant(ModelConformance):
    """Biases, windows, YaRN, a tied head."""

    spec = SPECS["qwen3"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        rope = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        }
        options = {"attention_bias": True, "tie_word_embeddings": True, "max_window_layers": 2}
        write_tiny("qwen3", folder, seed=1, rope_parameters=rope, **options, **WINDOW)


class TestQwen3Moe(ModelConformance):
    """Every second layer is sparse, with normalised weights."""

    spec = SPECS["qwen3_moe"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("qwen3_moe", folder)


class TestQwen3MoeVariant(ModelConformance):
    """Weights not normalised, a dense layer by its index, biases, windows in all layers."""

    spec = SPECS["qwen3_moe"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        options = {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [2],
            "norm_topk_prob": False,
            "attention_bias": True,
        }
        write_tiny("qwen3_moe", folder, seed=1, **options, **WINDOW)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_experts_of_the_tiny_checkpoints_are_stored_as_published(family, tmp_path):
    """Saves one matrix per expert; tests/weights/test_layouts.py loads them stacked."""
    write_tiny(family, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        keys = {*file.keys()}
    assert "model.layers.1.mlp.experts.5.gate_proj.weight" in keys
    assert not any(key.endswith("experts.gate_up_proj") for key in keys)


def test_default_reasoning_parsers_exist():
    names = {spec.name for spec in provide_reasoning_parsers()}
    wanted = {spec.reasoning for spec in SPECS.values()} - {None}
    assert wanted
    assert wanted <= names
