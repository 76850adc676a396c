"""The draft layer of Qwen3-Next and Qwen3.5 checkpoints (mtp.*): gated attention and an MLP, dense
or with experts, after norms of the embedding and of the hidden state. Of several
layers only the first is used, for all tokens that are guessed."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.layers import CausalLM, DecoderConfig, DecoderLayer, GatedAttention
from mmdeploy_llm.layers.drafts import add_draft_head

KEYS = r"^mtp\."
RENAMES = (
    (r"^mtp\.pre_fc_norm_embedding\.", "draft_head.embed_norm."),
    (r"^mtp\.pre_fc_norm_hidden\.", "draft_head.hidden_norm."),
    (r"^mtp\.fc\.", "draft_head.proj."),
    (r"^mtp\.layers\.0\.", "draft_head.layer."),
    (r"^mtp\.norm\.", "draft_head.norm."),
)


class DraftLayer(DecoderLayer):
    """A layer with gated attention."""

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """See DecoderLayer."""
        self.self_attn = GatedAttention(config, layer)


def add_head(model: CausalLM, config: Any) -> None:
    """Adds the draft head; see ModelSpec.draft_head."""
    if getattr(config.get_text_config(), "mtp_use_dedicated_embeddings", False):
        raise ConfigError(
            "speculative='mtp', but the draft layer of this checkpoint has an embedding of its own "
            "(mtp_use_dedicated_embeddings), which is not supported: leave speculative out"
        )
    add_draft_head(
        model,
        DraftLayer,
        keys=KEYS,
        renames=RENAMES,
        surplus=(r"^mtp\.layers\.[1-9]",),
        is_sparse=model.sizes.moe is not None,
    )
