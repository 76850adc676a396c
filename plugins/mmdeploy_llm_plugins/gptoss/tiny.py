"""Tiny checkpoints of gpt-oss."""

from __future__ import annotations

from mmdeploy_llm.testing.tiny import text_family

GPT_OSS = text_family(
    "GptOssForCausalLM",
    head_dim=24,
    intermediate_size=32,
    num_local_experts=6,
    num_experts_per_tok=2,
    sliding_window=6,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 512,
    },
)
