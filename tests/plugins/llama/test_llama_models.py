"""Llama and Mistral against transformers: see testing.model_conformance."""

import pytest
import torch
from mmdeploy_llm_plugins.llama import provide_models

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.testing.model_conformance import ModelConformance, build
from mmdeploy_llm.testing.reference import Reference
from mmdeploy_llm.testing.tiny import write_tiny

SPECS = {spec.name: spec for spec in provide_models()}
TEXT_ONLY = {"text": (), "other text": ()}


class TestLlama(ModelConformance):
    """Heads whose size is not hidden / heads, an untied head."""

    spec = SPECS["llama"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("llama", folder)


class TestLlamaScaledRope(ModelConformance):
    """The frequencies of Llama 3.1 and later: some kept, some divided, some interpolated; all
    biases; a tied head."""

    spec = SPECS["llama"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        rope = {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        options = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
        write_tiny("llama", folder, seed=1, rope_parameters=rope, **options)


class TestLlamaLinearRope(ModelConformance):
    """Positions divided by a factor; every query head has its own key head."""

    spec = SPECS["llama"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
        write_tiny("llama", folder, seed=2, rope_parameters=rope, num_key_value_heads=4)


class TestMistral(ModelConformance):
    """Every layer has a window that is shorter than the prompt."""

    spec = SPECS["mistral"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("mistral", folder)


class TestMistralWithoutWindow(ModelConformance):
    """YaRN, as in the long-context models."""

    spec = SPECS["mistral"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        rope = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        }
        options = {"sliding_window": None, "head_dim": 20}
        write_tiny("mistral", folder, seed=1, rope_parameters=rope, **options)


def test_rope_that_follows_the_length_is_refused(tmp_path):
    write_tiny("llama", tmp_path)
    config = Reference(tmp_path).config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelNotSupportedError, match="'dynamic'"):
        build(SPECS["llama"], tmp_path, config, torch.float32)


def test_other_activations_are_refused(tmp_path):
    write_tiny("llama", tmp_path)
    config = Reference(tmp_path).config
    config.hidden_act = "gelu"
    with pytest.raises(ModelNotSupportedError, match="'gelu' of this llama model"):
        build(SPECS["llama"], tmp_path, config, torch.float32)
