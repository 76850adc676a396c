"""NeoMME: transformers' encoder of texts and of the patches of pictures, all of whose tokens see
each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.neomme import modeling_neomme as theirs

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.layers import Linear, to_device
from mmdeploy_llm.weights.map import Target, WeightMap
from mmdeploy_llm_plugins.transformers_parts.packed import PackedEncoder

RENAMES = (
    (r"^model\.", ""),
    (r"^(?!multi_vector_head\.)", "text.inner."),
    (r"\.embed_tokens\.", ".embed_tokens.own."),
)
IGNORED = (r"^(lm_head|unembedding_projection)\.",)  # it predicts no tokens
NUM_AXES = 2  # of positions: rows and columns


class Words(nn.Module):
    """transformers' embeddings of tokens, with those of media in their places. inputs: of the
    current step; NeoMMEModel is the only writer."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.inputs: ForwardInputs | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """[1, T] -> [1, T, hidden]."""
        found: Tensor = self.own(ids)
        return found if self.inputs is None else self.inputs.merge_media(found[0])[None]


class NeoMMEModel(nn.Module):
    """transformers' NeoMMEModel and NeoMMEForMaskedLM, which gives vectors here too."""

    is_bidirectional = is_embedder = True
    cache = ()  # nothing is kept between steps
    default_pooling = "mean"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self._image = config.image_token_id
        self.text = PackedEncoder(config, theirs.NeoMMEModel)
        self.text.inner.embed_tokens = Words(self.text.inner.embed_tokens)
        self._masks = dict.fromkeys(range(self.num_layers))  # attention knows prompts and windows
        self.map_weights()

    def map_weights(self) -> None:
        """Builds the map of weights for the modules so far."""
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=IGNORED)

    @property
    def words(self) -> Words:
        """The embeddings, which are part of transformers' encoder."""
        found: Words = self.text.inner.embed_tokens
        return found

    @property
    def text_layers(self) -> Sequence[nn.Module]:
        """See hooks.Model."""
        return tuple(self.text.inner.layers)

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model."""
        return self.weight_map.targets(key)

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns rows and columns, [2, num_tokens]: those of patches, and of the token after each
        row, begin after the tokens before a picture. Raises RequestError for ids that are not those
        of a picture by itself."""
        if not media:
            return torch.arange(num_tokens).expand(NUM_AXES, -1)
        span, *others = media
        assert span.item.grid_thw is not None, "by its processor"
        _, rows, columns = span.item.grid_thw
        begin = span.offset + 1  # the token of a picture stands before its patches
        if others or num_tokens != begin + rows * (columns + 1):
            raise RequestError(
                "this model takes a picture as a prompt of its own; give no text or ids around it"
            )
        patches = [
            begin + torch.arange(rows).repeat_interleave(columns + 1),
            begin + torch.arange(columns + 1).repeat(rows),
        ]
        return torch.cat([torch.arange(begin).expand(NUM_AXES, -1), torch.stack(patches)], 1)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns for each picture the embedding of its token and those of its patches."""
        device = next(self.parameters()).device
        pixels = torch.cat([item.tensors["pixel_values"] for item in items])
        rows = self.text.inner.patch_embeddings(to_device(pixels, device).to(self.text.dtype))
        own = self.words.own(torch.tensor([self._image], device=device))
        parts = torch.split(rows, [item.num_tokens - 1 for item in items])
        return [torch.cat([own, part]) for part in parts]

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the last hidden states, [T, hidden]."""
        self.words.inputs = inputs
        try:
            out: Tensor = self.text(
                inputs, input_ids=inputs.token_ids[None], attention_mask=self._masks
            )
        finally:
            self.words.inputs = None
        return out


class MultiVectorHead(nn.Module):
    """Maps states to vectors."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.proj = Linear(config.hidden_size, config.embedding_dim)


class NeoMMEForRetrieval(NeoMMEModel):
    """transformers' class of the same name, with a vector for each token."""

    default_pooling = "tokens"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.multi_vector_head = MultiVectorHead(config)
        self.map_weights()

    def embedding(self, states: Tensor) -> Tensor:
        """Returns the vectors of tokens [N, hidden], of length 1."""
        return F.normalize(self.multi_vector_head.proj(states), dim=-1)
