"""ColPali: PaliGemma with a projection. Images of one size, and the decoder of Gemma, whose tokens
attend to each other in both directions and are counted from 1."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import LayerNorm, Linear, PlainVisionEncoder
from mmdeploy_llm_plugins.gemma.text import RENAMES as NORMS
from mmdeploy_llm_plugins.gemma.text import GemmaForCausalLM

from .late import LateInteraction, patch_rows
from .tower import TOWER_NAMES, plain_tower

NAMES = (
    (r"^language_model\.(model\.)?", "model."),
    (r"^vision_tower\.(vision_model\.)?", "visual."),
    (r"^multi_modal_projector\.linear\.", "projector."),
    (r"^visual\.post_layernorm\.", "tower_norm."),
    *TOWER_NAMES,
)


class ColPaliForRetrieval(LateInteraction, GemmaForCausalLM):
    """transformers' ColPaliForRetrieval. Raises ModelNotSupportedError for other decoders than
    Gemma's first, and for towers that are not SigLIP's."""

    is_bidirectional = True
    cache = ()  # nothing is kept between steps

    def __init__(self, config: Any) -> None:
        vlm = config.vlm_config
        text, vision = vlm.text_config, vlm.vision_config
        if text.model_type not in ("gemma", "gemma2"):
            raise ModelNotSupportedError(
                f"the text model {text.model_type!r} of this colpali checkpoint is not supported, "
                "only 'gemma' and 'gemma2'"
            )
        causal = copy(text)  # the engine, not the decoder, knows of both directions
        causal.use_bidirectional_attention = None
        GemmaForCausalLM.__init__(self, causal, is_tied=True)
        self.patch = vision.patch_size
        self.visual = PlainVisionEncoder(plain_tower(vision, merge_size=1))
        self.tower_norm = LayerNorm(vision.hidden_size, vision.layer_norm_eps)
        self.projector = Linear(vision.hidden_size, self.hidden_size, bias=True)
        names = (*NAMES, *NORMS) if text.model_type == "gemma2" else NAMES
        self.add_vectors(config, self.hidden_size, names)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the last hidden states, [T, hidden]."""
        vocab_size = self.model.embed_tokens.weight.shape[0] or self.vocab_size
        return super().forward(
            replace(
                inputs,
                token_ids=inputs.token_ids.clamp(max=vocab_size - 1),
                positions=inputs.positions + 1,
            )
        )

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, hidden] for each item; all images go through the tower together."""
        device = self.projector.weight.device
        pixels = patch_rows(items, self.patch, self.visual.merge_size, device)
        rows = self.projector(self.tower_norm(self.visual(pixels)))
        return torch.split(rows, [item.num_tokens for item in items])
