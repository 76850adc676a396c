"""Tiny checkpoints of GLM-4."""

from __future__ import annotations

from mmdeploy_llm.testing.tiny import text_family

TEMPLATE = (
    "{{- '[gMASK]<sop>' -}}{%- for m in messages -%}"
    "{{- '<|' ~ m.role ~ '|>\\n' ~ m.content -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)
SPECIAL_TOKENS = ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")
# The first layer is dense.
EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}

GLM = text_family(
    "GlmForCausalLM",
    chat_template=TEMPLATE,
    eos_token="<|endoftext|>",
    special_tokens=SPECIAL_TOKENS,
    head_dim=20,
)
GLM4 = text_family(
    "Glm4ForCausalLM",
    chat_template=TEMPLATE,
    eos_token="<|user|>",
    special_tokens=SPECIAL_TOKENS,
    head_dim=20,
)
GLM4_MOE = text_family(
    "Glm4MoeForCausalLM",
    chat_template=TEMPLATE,
    eos_token="<|user|>",
    special_tokens=SPECIAL_TOKENS,
    head_dim=16,
    use_qk_norm=True,
    **EXPERTS,
)
