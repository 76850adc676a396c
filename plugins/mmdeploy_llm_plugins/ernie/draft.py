"""The draft layer of ERNIE 4.5 checkpoints (mtp_*): a dense layer after norms of the embedding and
of the hidden state, and the model's own norm before the head."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.layers import CausalLM
from mmdeploy_llm.layers.drafts import add_draft_head

KEYS = r"(^|\.)mtp_"
PREFIX = r"^(?:model\.)?(?:language_model\.)?mtp_"
RENAMES = (
    (rf"{PREFIX}emb_norm\.0\.", "draft_head.embed_norm."),
    (rf"{PREFIX}hidden_norm\.0\.", "draft_head.hidden_norm."),
    (rf"{PREFIX}linear_proj\.0\.", "draft_head.proj."),
    (rf"{PREFIX}block\.0\.", "draft_head.layer."),
)


def add_head(model: CausalLM, config: Any) -> None:
    """Adds the draft head; see ModelSpec.draft_head. Of several layers only the first is used, for
    all tokens that are guessed."""
    del config
    surplus = (r"(^|\.)mtp_\w+\.[1-9]",)
    add_draft_head(model, keys=KEYS, renames=RENAMES, surplus=surplus, shares_norm=True)
