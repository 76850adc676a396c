"""GLM-4 against transformers: see testing.model_conformance."""

from mmdeploy_llm_plugins.glm import provide_models

from mmdeploy_llm.testing.model_conformance import ModelConformance
from mmdeploy_llm.testing.tiny import write_tiny

SPECS = {spec.name: spec for spec in provide_models()}
TEXT_ONLY = {"text": (), "other text": ()}


class TestGlm(ModelConformance):
    """Half of every head is rotated, in interleaved pairs; gate and up are one matrix."""

    spec = SPECS["glm"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("glm", folder)


class TestGlmWholeHeads(ModelConformance):
    """All channels are rotated; no biases; a tied head."""

    spec = SPECS["glm"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        options = {"attention_bias": False, "tie_word_embeddings": True}
        write_tiny("glm", folder, seed=1, rope_parameters=rope, **options)


class TestGlm4(ModelConformance):
    """Norms after attention and MLP."""

    spec = SPECS["glm4"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        write_tiny("glm4", folder)


class TestGlm4ScaledRope(ModelConformance):
    """YaRN on some channels of every head, as GLM-Z1 recommends for long prompts."""

    spec = SPECS["glm4"]
    cases = TEXT_ONLY

    @staticmethod
    def write(folder):
        rope = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "partial_rotary_factor": 0.5,
        }
        write_tiny("glm4", folder, seed=1, rope_parameters=rope, head_dim=16)
