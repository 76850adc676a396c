"""The tiny checkpoint of the tests."""

from mmdeploy_llm.testing.tiny import text_family

TINY = text_family(
    "Phi3ForCausalLM",
    sliding_window=None,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 2.5, 3.0, 3.5],
        "original_max_position_embeddings": 256,
    },
)
