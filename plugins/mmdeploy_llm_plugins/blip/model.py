"""BLIP: transformers' tower, and a decoder of BERT with cross attention and BERT's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.blip.modeling_blip import BlipVisionModel

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import LayerNorm, Linear
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.encoder_decoder.decoder import CrossDecoderConfig, EncoderDecoderLM
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

from .image import num_cells

LAYER = r"^text_decoder\.bert\.encoder\.layer\.(\d+)\."
OWN = r"decoder.layers.\1."
ATTENTIONS = (("attention", "self"), ("crossattention", "encoder"))
NAMES = (
    (r"^vision_model\.", "encoder.inner."),
    *(
        (rf"{LAYER}{theirs}\.self\.{old}\.", rf"{OWN}{ours}_attn.{new}_proj.")
        for theirs, ours in ATTENTIONS
        for old, new in (("query", "q"), ("key", "k"), ("value", "v"))
    ),
    *(
        (rf"{LAYER}{theirs}\.output\.{old}\.", rf"{OWN}{ours}_{new}.")
        for theirs, ours in ATTENTIONS
        for old, new in (("dense", "attn.out_proj"), ("LayerNorm", "norm"))
    ),
    (rf"{LAYER}intermediate\.dense\.", rf"{OWN}mlp.fc1."),
    (rf"{LAYER}output\.dense\.", rf"{OWN}mlp.fc2."),
    (rf"{LAYER}output\.LayerNorm\.", rf"{OWN}mlp_norm."),
    (r"^text_decoder\.bert\.embeddings\.word_embeddings\.", "decoder.embed_tokens."),
    (r"^text_decoder\.bert\.embeddings\.position_embeddings\.", "decoder.embed_positions."),
    (r"^text_decoder\.bert\.embeddings\.LayerNorm\.", "decoder.layernorm_embedding."),
    (r"^text_decoder\.cls\.predictions\.transform\.", "head."),
    (r"^text_decoder\.cls\.predictions\.decoder\.weight$", "lm_head.weight"),
    (r"^text_decoder\.cls\.predictions\.(decoder\.)?bias$", "head.bias"),
)
COUNTED = r"\.position_ids$"
HEAD = r"^text_decoder\.cls\.predictions\."


class WordHead(nn.Module):
    """Computes, from hidden states, what is multiplied by the embeddings to score words."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.dense = Linear(text.hidden_size, text.hidden_size, bias=True)
        self.activation = ACT2FN[text.hidden_act]
        self.LayerNorm = LayerNorm(text.hidden_size, text.layer_norm_eps)
        self.bias = nn.Parameter(torch.empty(text.vocab_size), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]; `bias` is for the scores."""
        out: Tensor = self.LayerNorm(self.activation(self.dense(hidden)))
        return out


class BlipForConditionalGeneration(EncoderDecoderLM):
    """transformers' class of the same name."""

    def __init__(self, config: Any) -> None:
        text, vision = config.text_config, config.vision_config
        is_tied = bool(config.tie_word_embeddings or text.tie_word_embeddings)
        super().__init__(
            CrossDecoderConfig(
                vocab_size=text.vocab_size,
                hidden_size=text.hidden_size,
                intermediate_size=text.intermediate_size,
                num_layers=text.num_hidden_layers,
                num_heads=text.num_attention_heads,
                encoder_size=vision.hidden_size,
                encoder_positions=num_cells(vision),
                num_positions=text.max_position_embeddings,
                activation=text.hidden_act,
                norm_eps=text.layer_norm_eps,
                is_tied=is_tied,
            )
        )
        self.encoder = TransformersTower(vision, BlipVisionModel)
        self.head = WordHead(text)
        # Of the two biases of the head transformers adds that of the decoder, to which it ties the
        # other with the embeddings.
        unused = r"decoder\." if is_tied else r"bias$"
        self.weight_map = WeightMap(self, renames=NAMES, ignored=(COUNTED, HEAD + unused))

    def encode(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Runs the tower for all pictures, which have the same size."""
        device = self.decoder.embed_tokens.weight.device
        pixels = torch.cat([item.tensors["pixel_values"] for item in items])
        cells = self.encoder.inner(pixels.to(device, self.encoder.dtype)).last_hidden_state
        return list(cells.unbind())

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the scores of words, [N, hidden] -> [N, vocab]."""
        return super().logits(self.head(hidden)) + self.head.bias
