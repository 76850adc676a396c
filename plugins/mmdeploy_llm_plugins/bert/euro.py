"""EuroBERT and UltraBERT: layers of the standard decoder with attention in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmdeploy_llm.layers import CausalLM, DecoderConfig, standard_decoder
from mmdeploy_llm.weights.map import WeightMap

# What training and classification read, and the mask token.
NOT_NEEDED = ("classifier_pooling", "classifier_dropout", "mask_token_id", "prediction_head_size")
IGNORED = (r"^(lm_head|cls|head|decoder)\.", r"rotary_emb\.inv_freq$")  # it predicts no tokens
# A model by itself has no prefix, one with a head that of its class or of the family.
RENAMES = ((r"^ultrabert\.", ""), (r"^(embed_tokens|layers|norm)\.", r"model.\1."))


class EuroBertModel(CausalLM):
    """transformers' EuroBertModel and UltrabertModel. It gives vectors, and generates nothing."""

    is_embedder = True
    is_bidirectional = True
    default_pooling = "mean"

    def __init__(self, config: Any) -> None:
        super().__init__(euro_config(config))
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=IGNORED)


def euro_config(config: Any) -> DecoderConfig:
    """Converts a config of EuroBERT or UltraBERT. The latter's says how far a token of a layer with
    a window sees to each side; ours is both sides together."""
    decoder = standard_decoder(config, own=(*NOT_NEEDED, "pretraining_tp"))
    windows = decoder.windows
    if windows is not None:
        windows = tuple(None if window is None else 2 * window for window in windows)
    return replace(decoder, is_tied=True, windows=windows)  # there is no output head
