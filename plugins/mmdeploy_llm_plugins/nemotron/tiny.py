"""A tiny checkpoint of Nemotron-H with all kinds of layers."""

from __future__ import annotations

from mmdeploy_llm.testing.tiny import text_family

NEMOTRON_H = text_family(
    "NemotronHForCausalLM",
    layers_block_type=["mlp", "linear_attention", "full_attention", "moe", "linear_attention"],
    head_dim=16,
    ssm_state_size=12,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=2,
    n_routed_experts=8,
    moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=40,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
)
