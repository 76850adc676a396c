"""DraftHead: guesses the token after the next one (multi-token prediction).

    x      = proj(cat(embed_norm(embedding of token i + 1), hidden_norm(hidden state of token i)))
    hidden = norm(layer(x))          one decoder layer, with a cache of its own
    logits = the model's head        of token i + 2

`hidden` takes the place of the model's hidden state when one token more is guessed. The entry of
token i lies in the cache at the place of token i, though it depends on token i + 1 too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from mmdeploy_llm.caches import PagedKV, layer_caches
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.layers import CausalLM, Decoder, DecoderConfig, DecoderLayer
from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
from mmdeploy_llm.layers.basic.linear import Linear
from mmdeploy_llm.layers.basic.norm import LayerNorm, RMSNorm
from mmdeploy_llm.layers.basic.recordings import Recordings, can_record
from mmdeploy_llm.weights.map import Replacement, WeightMap


class DraftHead(KernelLayer):
    """The modules of a draft head beside the model's embedding, rotary embedding and head."""

    has_decoder_layers = True  # they are sharded as those of a decoder
    norm: RMSNorm | LayerNorm | None

    def __init__(
        self,
        config: DecoderConfig,
        layer: nn.Module,
        decoder: Decoder,
        *,
        shares_norm: bool,
        is_hidden_first: bool,
    ) -> None:
        """layer: as a NewLayer builds it. decoder: the model's. shares_norm: whether the norm after
        the layer is the model's own. is_hidden_first: whether `proj` reads the hidden state before
        the embedding."""
        super().__init__()
        size = config.hidden_size
        self.embed_norm = config.new_residual_norm()
        self.hidden_norm = config.new_residual_norm()
        self.proj = Linear(2 * size, size, bias=False)
        self.layer = layer
        self.norm = None if shares_norm else config.new_residual_norm()
        self.is_hidden_first = is_hidden_first
        self._recordings = Recordings()
        self._decoders = (decoder,)  # in a tuple: its parameters are not the head's

    def forward(self, inputs: ForwardInputs, hidden: Tensor) -> Tensor:
        """Returns [T, hidden]. inputs: with the token that follows each row's own, whose place the
        positions and the attention are of. hidden: [T, hidden]."""
        (decoder,) = self._decoders
        embeds = self.embed_norm(decoder.embedded(inputs))
        parts = (embeds, self.hidden_norm(hidden))
        x = torch.cat(parts[::-1] if self.is_hidden_first else parts, 1)
        compute = partial(self._compute, decoder)
        # The recording reads x where one of a decoder reads token ids.
        own = replace(inputs, token_ids=x, media_rows=None, media_embeds=None)
        if not self.kernels.is_compiled or not can_record(own):
            return compute(own)
        return self._recordings.run(own, self.kernels, compute)

    def _compute(self, decoder: Decoder, inputs: ForwardInputs) -> Tensor:
        """Computes all that follows the two norms; `inputs.token_ids` are these, [T, 2 hidden]."""
        x = self.proj(inputs.token_ids)
        x, residual = self.layer(x, None, decoder.begin(inputs, x, None))
        norm = decoder.norm if self.norm is None else self.norm
        out, _ = norm.add(x, residual)
        return out


def add_draft_head(
    model: CausalLM,
    new_layer: Callable[[DecoderConfig, int], nn.Module] = DecoderLayer,
    *,
    keys: str,
    renames: Sequence[tuple[str, Replacement]],
    surplus: Sequence[str] = (),
    is_sparse: bool = False,
    shares_norm: bool = False,
    is_hidden_first: bool = False,
) -> None:
    """Gives a model a draft head, whose layer keeps a PagedKV after those of the model's layers.

    new_layer: see Decoder; the layer attends to all tokens. keys: the pattern with which the
    model's WeightMap ignores the tensors of draft layers. renames: from their keys to the names of
    DraftHead's modules, below draft_head. surplus: patterns of those that stay ignored. is_sparse:
    whether its MLP has the model's experts. For the others see DraftHead.
    """
    index = model.sizes.num_layers
    own = replace(
        model.sizes,
        windows=None,
        moe=model.sizes.moe if is_sparse else None,
        moe_layers=frozenset([index] if is_sparse else []),
    )
    caches = layer_caches(model)
    model.draft_head = DraftHead(
        own,
        new_layer(own, index),
        model.model,
        shares_norm=shares_norm,
        is_hidden_first=is_hidden_first,
    )
    model.cache = (*caches, PagedKV(num_kv_heads=own.num_kv_heads, head_dim=own.head_dim))
    before = model.weight_map
    model.weight_map = WeightMap(
        model,
        renames=(*renames, *before.renames),
        ignored=(*surplus, *(pattern for pattern in before.ignored if pattern != keys)),
    )
