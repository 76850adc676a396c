"""Tiny checkpoints of the families."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.testing.tiny import text_family

WINDOWS: dict[str, Any] = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

ARCEE = text_family("ArceeForCausalLM")
BLOOM = text_family("BloomForCausalLM")
COHERE = text_family("CohereForCausalLM", logit_scale=0.3)
COHERE2 = text_family("Cohere2ForCausalLM", logit_scale=0.3, **WINDOWS)
EXAONE4 = text_family("Exaone4ForCausalLM", **WINDOWS)
FALCON = text_family("FalconForCausalLM")
GPT_NEO = text_family(
    "GPTNeoForCausalLM",
    num_layers=3,
    attention_types=[[["local", "global", "local"], 1]],
    window_size=7,
)
GPT_NEOX = text_family("GPTNeoXForCausalLM", rope_parameters=HALF)
HELIUM = text_family("HeliumForCausalLM", head_dim=16)
HYPERCLOVAX = text_family(
    "HyperCLOVAXForCausalLM",
    attention_multiplier=0.3,
    embedding_multiplier=3.0,
    logits_scaling=0.25,
    residual_multiplier=0.5,
)
JAIS2 = text_family("Jais2ForCausalLM")
MINISTRAL = text_family("MinistralForCausalLM", head_dim=16, **WINDOWS)
MIXTRAL = text_family("MixtralForCausalLM", num_local_experts=6, num_experts_per_tok=2)
MPT = text_family("MptForCausalLM", n_layers=3)
NEMOTRON = text_family("NemotronForCausalLM", head_dim=16, rope_parameters=HALF)
OLMO = text_family("OlmoForCausalLM")
OLMO2 = text_family("Olmo2ForCausalLM")
OLMO3 = text_family("Olmo3ForCausalLM", **WINDOWS)
PHI = text_family("PhiForCausalLM", rope_parameters=HALF)
SEED_OSS = text_family("SeedOssForCausalLM", head_dim=20)
SMOLLM3 = text_family("SmolLM3ForCausalLM", no_rope_layers=[1, 0, 1])
STABLELM = text_family("StableLmForCausalLM", rope_parameters=HALF)
STARCODER2 = text_family("Starcoder2ForCausalLM", sliding_window=7)
