"""EmbeddingGemma 2: transformers' encoder of texts in both directions, with Gemma 4's towers. The
vector of a prompt is the mean of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.embedding_gemma2 import modeling_embedding_gemma2 as theirs

from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.weights.map import Target, WeightMap
from mmdeploy_llm_plugins.transformers_parts.packed import PackedEncoder

from .decoder4 import GLOBAL, LOCAL
from .model4 import IGNORED, RENAMES, Towers
from .text import RENAMES as NORMS

TEXT = (r"^(language_model\.|(?=embed_tokens|layers|norm|ple|embedding_proj))", "text.inner.")
NAMES = (
    TEXT,
    (r"^(vision_tower|audio_tower|embed_vision|embed_audio)\.", r"model.\1."),
    *RENAMES,
    *((rf"^(visual\..*){old}", rf"\1{new}") for old, new in NORMS),
)
NO_MASKS = {GLOBAL: None, LOCAL: None}  # the engine's attention knows the prompts and windows


class EmbeddingGemma2TextModel(nn.Module):
    """transformers' class of the same name."""

    is_embedder = True
    is_bidirectional = True
    default_pooling = "mean"
    cache = ()  # nothing is kept between steps
    weight_map: WeightMap

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.text = PackedEncoder(config, theirs.EmbeddingGemma2TextModel)
        self.num_layers, self.hidden_size = config.num_hidden_layers, config.embedding_dim
        first = config.per_layer_config[0]  # layers differ; nothing is sized by this
        self.num_kv_heads, self.head_dim = first.num_key_value_heads, first.head_dim
        self.media_size, self.max_positions = config.hidden_size, config.max_position_embeddings
        self.map_weights()

    def map_weights(self) -> None:
        """Builds the map of weights for the modules so far."""
        self.weight_map = WeightMap(self, renames=NAMES, ignored=IGNORED)

    @property
    def text_layers(self) -> Sequence[nn.Module]:
        """See hooks.Model."""
        return tuple(self.text.inner.layers)

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns None: token i is at position i."""
        return None

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model."""
        return self.weight_map.targets(key)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the states of tokens, projected to the size of the vectors, [T, size]."""
        x = inputs.merge_media(self.text.inner.embed_tokens(inputs.token_ids))
        out: Tensor = self.text(inputs, inputs_embeds=x[None], attention_mask=NO_MASKS)
        return out


class EmbeddingGemma2Model(Towers, EmbeddingGemma2TextModel):
    """transformers' class of the same name. Raises as Towers.add_towers."""

    def __init__(self, config: Any) -> None:
        EmbeddingGemma2TextModel.__init__(self, config.text_config)
        self.add_towers(config, self.media_size)
        self.map_weights()
