"""Gemma 4: a decoder with several kinds of layers, a tower for images and videos, and in small
models one for sounds, which is transformers'.

image   --> patches of 16 x 16 pixels    the processor
patches --> one token for 3 x 3 patches  Gemma4Tower
token   --> an embedding of the decoder  Projector
sound   --> log-mel frames               transformers' processor
frames  --> one token for 40 ms          TransformersTower, Projector
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import MediaError, ModelNotSupportedError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import CausalLM, Linear, media_grid, to_device
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

from .decoder4 import (
    Gemma4Decoder,
    UnweightedNorm,
    decoder_config,
    layer_cache,
    new_layer,
    owner_of,
)
from .text import RENAMES as TEXT_RENAMES
from .tower4 import Gemma4Tower

RENAMES = (
    (r"^(model\.)?language_model\.(model\.)?", "model."),
    (r"^model\.vision_tower\.patch_embedder\.", "visual."),
    (r"^model\.vision_tower\.encoder\.", "visual."),
    (r"^model\.vision_tower\.", "visual."),
    (r"\.router\.scale$", ".router.norm.weight"),
    (r"^model\.embed_vision\.(multimodal_embedder\.)?embedding_projection\.", "projector.linear."),
    # Of Gemma 4 Unified, in its files and as its modules are named.
    (r"^model\.(vision_embedder|embed_vision)\.p", "embedder.p"),
    (r"^model\.audio_tower\.", "audio.inner."),
    (r"^model\.embed_audio\.embedding_projection\.", "audio_projector.linear."),
)
SOUNDS = r"^(model\.)?(audio_tower|embed_audio)\."
IGNORED = (r"rotary_emb\.",)
# A layer that reads the keys and values of another has projections of its own in some checkpoints.
UNUSED = r"(^|language_model\.|model\.)layers\.({layers})\.self_attn\.[kv]_(proj|norm)\."


class Projector(nn.Module):
    """Turns tokens of the tower into embeddings of the decoder."""

    def __init__(self, tower: Any, size: int) -> None:
        """tower: the tower's config. size: of the decoder's embeddings."""
        super().__init__()
        self.norm = UnweightedNorm(tower.rms_norm_eps)
        self.linear = Linear(getattr(tower, "output_proj_dims", 0) or tower.hidden_size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Computes [M, tower size] -> [M, hidden]."""
        out: Tensor = self.linear(self.norm(x))
        return out


class Gemma4ForCausalLM(CausalLM):
    """transformers' Gemma4ForCausalLM."""

    def __init__(self, config: Any, *, is_tied: bool | None = None) -> None:
        """config: the text config. is_tied: None: as it says."""
        is_tied = config.tie_word_embeddings if is_tied is None else is_tied
        decoder = partial(Gemma4Decoder, text=config)
        super().__init__(decoder_config(config, is_tied=is_tied), new_layer(config), decoder)
        self.cache = layer_cache(config)
        self.weight_map = self.map_of(config)

    def map_of(self, text: Any) -> WeightMap:
        """Builds the map of weights for the modules so far."""
        readers = [str(i) for i in range(self.num_layers) if owner_of(text, i) is not None]
        unused = [UNUSED.format(layers="|".join(readers))] if readers else []
        sounds = [] if hasattr(self, "audio_projector") else [SOUNDS]
        ignored = [*IGNORED, *sounds, *unused, *(() if self.lm_head else (r"(^|\.)lm_head\.",))]
        return WeightMap(self, renames=(*RENAMES, *TEXT_RENAMES), ignored=ignored)


class Towers(nn.Module):
    """The towers of Gemma 4, which a model derives from besides its own class."""

    audio: TransformersTower

    def add_towers(self, config: Any, size: int) -> None:
        """Adds those of a config to a model with embeddings of this size. Raises
        ModelNotSupportedError for a config without a vision tower."""
        if config.vision_config is None:
            text = type(config.text_config).__name__
            raise ModelNotSupportedError(
                f"vision_config of this {config.model_type} model is empty; a model of text alone "
                f"has the architecture of a {text}"
            )
        self.visual = Gemma4Tower(config.vision_config)
        self.projector = Projector(config.vision_config, size)
        if config.audio_config is not None:
            self.audio = TransformersTower(config.audio_config)
            self.audio_projector = Projector(config.audio_config, size)

    @property
    def hears(self) -> bool:
        """Whether the model has a tower for sounds."""
        return hasattr(self, "audio")

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, hidden] for each item; all images and videos go through the tower
        together, each sound by itself."""
        device = self.visual.position_embedding_table.device
        seen = [item for item in items if item.kind != "audio"]
        found = {id(item): self._heard(item, device) for item in items if item.kind == "audio"}
        if seen:
            pixels = torch.cat([to_device(item.tensors["pixels"], device) for item in seen])
            rows = self.projector(self.visual(pixels, [media_grid(item) for item in seen]))
            split = torch.split(rows, [item.num_tokens for item in seen])
            found |= {id(item): own for item, own in zip(seen, split, strict=True)}
        return [found[id(item)] for item in items]

    def _heard(self, item: MediaInput, device: torch.device) -> Tensor:
        """Returns the embeddings of a sound. Raises MediaError for a model that hears none."""
        if not self.hears:
            raise MediaError("this Gemma 4 has no tower for sounds; those of E2B and E4B do")
        features = item.tensors["input_features"].to(device, self.audio.dtype)
        mask = item.tensors["input_features_mask"].to(device)
        out = self.audio.inner(features, mask, return_dict=True)
        rows: Tensor = self.audio_projector(out.last_hidden_state[out.attention_mask])
        return rows


class Gemma4ForConditionalGeneration(Towers, Gemma4ForCausalLM):
    """transformers' Gemma4ForConditionalGeneration. Raises ModelNotSupportedError for a config
    without a vision tower."""

    def __init__(self, config: Any) -> None:
        Gemma4ForCausalLM.__init__(self, config.text_config, is_tied=config.tie_word_embeddings)
        ids = config.image_token_id, config.video_token_id, config.audio_token_id
        assert isinstance(self.model, Gemma4Decoder)
        self.model.media_ids = tuple(token_id for token_id in ids if token_id is not None)
        self.add_towers(config, self.hidden_size)
        self.weight_map = self.map_of(config.text_config)

    @property
    def hears(self) -> bool:
        """See Towers. No model whose media attend in both directions has sounds."""
        assert isinstance(self.model, Gemma4Decoder)
        return super().hears and not self.model.sees_ahead
