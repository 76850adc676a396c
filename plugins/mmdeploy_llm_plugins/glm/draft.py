"""The draft layer of checkpoints with GLM-4.5's decoder, and of GLM-OCR's: the layer after the last
one, with norms of the embedding and of the hidden state. Its copies of the model's embedding and
head are left out, as transformers leaves them out of its own draft layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from mmdeploy_llm.layers import CausalLM
from mmdeploy_llm.layers.drafts import add_draft_head

from .experts import GlmLayer, draft_keys


def add_head(model: CausalLM, config: Any) -> None:
    """Adds the draft head; see ModelSpec.draft_head."""
    keys = draft_keys(model.sizes)
    add_draft_head(
        model,
        partial(GlmLayer, text=config.get_text_config()),
        keys=keys,
        renames=(
            (keys + r"enorm\.", "draft_head.embed_norm."),
            (keys + r"hnorm\.", "draft_head.hidden_norm."),
            (keys + r"eh_proj\.", "draft_head.proj."),
            (keys + r"shared_head\.norm\.", "draft_head.norm."),
            (keys + r"(?:mtp_block\.)?", "draft_head.layer."),
        ),
        surplus=(keys + r"(embed_tokens|shared_head\.head)\.",),
    )
